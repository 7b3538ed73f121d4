"""The kernels as PyTorch operators: ``torch.ops.flashmoe_science``.

Eager calls on plain tensors go past the dispatcher (`flashmoe_science.direct`). All others meet these operators:
torch.compile, torch.export, modes that count or select (selective checkpointing, FLOP counters), transforms of
torch.func, tensor subclasses. Importing this package defines all of them, as a process needs that loads a program which
torch.export saved.
"""

from flashmoe_science.operators import (
    attention,
    flops,
    key_lists,
    moe,
    moe_quantized,
    moe_training,
    rotation,
    routing,
    varlen,
)

__all__ = [
    "attention",
    "flops",
    "key_lists",
    "moe",
    "moe_quantized",
    "moe_training",
    "rotation",
    "routing",
    "varlen",
]
