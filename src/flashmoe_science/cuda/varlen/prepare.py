"""Which kernel takes a problem of attention over sequences of any lengths."""

from __future__ import annotations

import torch

from flashmoe_science.errors import DeviceError
from flashmoe_science.varlen.problem import Problem, Run


def prepare(problem: Problem, device: torch.device) -> Run:
    """See `flashmoe_science.varlen.problem.Backend`."""
    raise DeviceError(
        f"attention_varlen has no kernel for {device} yet; use tensors on the CPU, or flash_attention for each sequence"
    )
