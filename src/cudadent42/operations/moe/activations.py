"""The names of the experts' activations, without torch."""

from __future__ import annotations

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai", "silu_no_mul", "gelu_no_mul", "relu2_no_mul")
"""The values of ``flashmoe_science.moe_arguments.Activation``, whose module imports torch."""

W13_LAYOUTS = ("concat", "interleaved")
"""Those of ``W13Layout`` there."""
