"""Bands of a pattern around the memory that a candidate is given: what is written past a tensor shows in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from cudadent42.operations.interface import Inputs

GUARD_BYTES = 4096
"""On either side: a page, and more than the widest tile row that a kernel may finish beyond the end."""

_PATTERN = 0xA5
_ALIGNMENT = 256
"""Of addresses, in bytes. A guarded tensor lies as its original does modulo this, so that a kernel takes the same
way."""

InputsT = TypeVar("InputsT", bound=Inputs)

Allocate = Callable[[Tensor], Tensor]
"""A new tensor with the shape, strides, dtype and device of another, its values undefined."""

_allocator: ContextVar[Allocate] = ContextVar("allocator", default=torch.empty_like)


@dataclass(frozen=True)
class Guard:
    """One guarded tensor's memory."""

    name: str
    buffer: Tensor
    """Bytes: a band, the tensor, a band."""
    start: int
    stop: int
    """Of the tensor, in ``buffer``."""

    @property
    def damage(self) -> str:
        """Where the bands are not what they were; empty if nowhere. Waits for the device."""
        parts = []
        for side, band in (
            ("before", self.buffer[: self.start]),
            ("past the end of", self.buffer[self.stop :]),
        ):
            changed = int((band != _PATTERN).sum())
            if changed:
                parts.append(f"wrote {changed} bytes {side} its {self.name}")
        return "; ".join(parts)


def damage(guards: Sequence[Guard]) -> str:
    """Of all of them, in one phrase; empty if none."""
    return "; ".join(filter(None, (guard.damage for guard in guards)))


def repair(guards: Sequence[Guard]) -> None:
    """Writes the pattern again, so that one candidate's damage is not found after the next."""
    for guard in guards:
        guard.buffer[: guard.start] = _PATTERN
        guard.buffer[guard.stop :] = _PATTERN


def guarded(sets: Sequence[InputsT]) -> tuple[list[InputsT], tuple[Guard, ...]]:
    """Copies of sets of inputs with bands around each tensor. What sets share, such as the weights of experts, their
    copies share too."""
    copies: dict[int, Tensor] = {}
    guards = []
    guarded_sets = []
    for inputs in sets:
        changed = {}
        for field in dataclasses.fields(inputs):  # type: ignore[arg-type]  # every Inputs is a frozen dataclass
            value = getattr(inputs, field.name)
            if not isinstance(value, Tensor):
                continue
            if id(value) not in copies:
                copies[id(value)], guard = _guarded_like(value, field.name)
                _copy_memory(value, guard)
                guards.append(guard)
            changed[field.name] = copies[id(value)]
        guarded_sets.append(dataclasses.replace(inputs, **changed))  # type: ignore[type-var]
    return guarded_sets, tuple(guards)


@contextmanager
def guarding_outputs() -> Iterator[list[Guard]]:
    """Inside, what ``empty_like`` hands out has bands, which are in the list."""
    guards: list[Guard] = []

    def allocate(like: Tensor) -> Tensor:
        tensor, guard = _guarded_like(torch.empty_like(like, device="meta"), "output", like.device)
        guards.append(guard)
        return tensor.fill_(float("nan"))

    token = _allocator.set(allocate)
    try:
        yield guards
    finally:
        _allocator.reset(token)


def empty_like(tensor: Tensor) -> Tensor:
    """``torch.empty_like``, for outputs that the lab allocates for a candidate."""
    return _allocator.get()(tensor)


def _copy_memory(tensor: Tensor, guard: Guard) -> None:
    """Element by element as they lie in memory: where a stride is 0, the copy's entries share a place too."""
    inside = guard.buffer[guard.start : guard.stop].view(tensor.dtype)
    inside.copy_(torch.as_strided(tensor, inside.shape, (1,), tensor.storage_offset()))


def _guarded_like(like: Tensor, name: str, device: torch.device | None = None) -> tuple[Tensor, Guard]:
    """With its strides, and its place within ``_ALIGNMENT``; its values undefined."""
    size = like.element_size()
    span = 1 + sum((length - 1) * stride for length, stride in zip(like.shape, like.stride(), strict=True))
    length = size * span if like.numel() else 0
    buffer = torch.full(
        (2 * GUARD_BYTES + _ALIGNMENT + length,), _PATTERN, dtype=torch.uint8, device=device or like.device
    )
    offset = (like.data_ptr() if like.numel() and not like.is_meta else 0) - buffer.data_ptr() - GUARD_BYTES
    start = GUARD_BYTES + offset % _ALIGNMENT
    inside = buffer[start : start + length].view(like.dtype)
    return torch.as_strided(inside, like.shape, like.stride()), Guard(name, buffer, start, start + length)
