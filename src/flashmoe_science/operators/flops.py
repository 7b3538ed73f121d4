"""Floating-point operations of the operators, for `torch.utils.flop_counter` and what reckons with it.

A multiply and an add are two, and products of matrices alone are counted. As PyTorch does for its own attention, a
causal mask does not lower the count, nor does the softmax raise it: a utilisation is comparable with that of
``scaled_dot_product_attention``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.flop_counter import register_flop_formula

if TYPE_CHECKING:
    from torch._ops import OpOverload

Shape = Sequence[int]
"""What a formula is given in the place of a tensor."""


def count_by(operator: OpOverload[..., Any], formula: Callable[..., int]) -> None:
    """PyTorch's counter takes this formula, of the operator's arguments with shapes for tensors."""
    register_flop_formula(operator.overloadpacket)(formula)
