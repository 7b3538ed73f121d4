"""What a call hands back: its form, whether it is finished, and whether it belongs to the inputs of now."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cudadent42.correctness.differences import GROSS, most_difference
from cudadent42.correctness.forms import parts_of


def copies(output: object) -> tuple[Tensor, ...]:
    """As it is now, on the stream in which it was asked for."""
    return tuple(part.detach().clone() for part in parts_of(output) if isinstance(part, Tensor))


def same(output: object, before: Sequence[Tensor]) -> bool:
    """Whether it is still, bit for bit, what it was."""
    now = [part for part in parts_of(output) if isinstance(part, Tensor)]
    return len(now) == len(before) and all(
        torch.equal(_bits(a), _bits(b)) for a, b in zip(now, before, strict=True)
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def grossly_differs(result: Tensor, reference: Tensor) -> bool:
    """Whether ``result`` is of something else than ``reference``, both of one shape."""
    return _differs(result, reference, GROSS)


def differs(result: Tensor, reference: Tensor) -> bool:
    """The same, or it was computed with less precision than its dtype has."""
    return _differs(result, reference, most_difference(reference.dtype))


def _differs(result: Tensor, reference: Tensor, share: float) -> bool:
    if result.shape != reference.shape:
        return True
    difference = torch.linalg.vector_norm((result.detach() - reference).float())
    # Not "greater": NaN is a difference too.
    return not bool(difference <= share * torch.linalg.vector_norm(reference.float()))
