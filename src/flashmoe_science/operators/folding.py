"""torch.func.vmap: the mapped dimension becomes part of one that the kernels take anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from flashmoe_science.operators.library import LIBRARY


class Mapping(Protocol):
    """What PyTorch tells a rule of vmap."""

    @property
    def batch_size(self) -> int: ...


Rule = Callable[..., tuple[Any, Any]]
"""Of (mapping, each argument's mapped dimension or None, the arguments); gives the results and their mapped dimensions.
"""


def register(name: str, rule: Rule) -> None:
    """The rule of the operator called ``name``, whose defaults it repeats."""
    torch.library.register_vmap(f"flashmoe_science::{name}", rule, lib=LIBRARY)


def mapped_first(tensor: torch.Tensor, dimension: int | None, size: int) -> torch.Tensor:
    """(size, ...): the mapped dimension in front; a tensor without one is repeated, without a copy."""
    return tensor.expand(size, *tensor.shape) if dimension is None else tensor.movedim(dimension, 0)


def fold(tensor: torch.Tensor, dimension: int | None, size: int) -> torch.Tensor:
    """(size * n, ...) of a tensor (n, ...) that is mapped; rows are contiguous."""
    folded = mapped_first(tensor, dimension, size).flatten(0, 1)
    return folded if folded.stride(-1) == 1 else folded.contiguous()


def unfold(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """(size, n, ...) of (size * n, ...)."""
    return tensor.view(size, tensor.shape[0] // size, *tensor.shape[1:])
