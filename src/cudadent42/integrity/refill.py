"""Fresh values in the memory of a case's inputs: whatever a candidate keeps of earlier ones is then wrong.

Each implementation has tensors of its own, of the same memory: what one does to its tensors' class, strides or
gradients reaches no other's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from numpy import add
from torch import Tensor

from cudadent42.base.seeds import derived_seed
from cudadent42.model.cases import Case
from cudadent42.operations import numerics
from cudadent42.operations.interface import Inputs

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size in bytes."""

_WORD = 8
"""Bytes that are summed at once: a sixth of the time that single entries of two bytes take."""


class FreshInputs:
    """The sets of inputs of one case, written again and again where they are."""

    def __init__(self, case: Case, sets: Sequence[Inputs]) -> None:
        self.case = case
        self.sets = tuple(sets)
        self.seeds: list[int] = []
        """Of the values so far, the present ones' last."""
        self._sums: list[int] = []
        self._written: list[Tensor] = []
        self._lent: list[tuple[Tensor, _Form]] = [
            (tensor, _form(tensor)) for each in self.sets for tensor in _tensors(each).values()
        ]
        """The lab's own tensors and the baseline's, with what they were."""

    def lend(self, *, kept: bool) -> list[Inputs]:
        """Sets for an implementation. ``kept``: whether they have to stay as they are, as the baseline's do."""
        others: dict[int, Tensor] = {}
        lent = []
        for inputs in self.sets:
            tensors = _tensors(inputs)
            for tensor in tensors.values():
                if id(tensor) not in others:
                    others[id(tensor)] = tensor.detach().requires_grad_(tensor.requires_grad)
            changed = {name: others[id(tensor)] for name, tensor in tensors.items()}
            lent.append(dataclasses.replace(inputs, **changed))  # type: ignore[type-var]
        if kept:
            self._lent += [(tensor, _form(tensor)) for tensor in others.values()]
        return lent

    @property
    def reformed(self) -> str:
        """What has become of a tensor that the lab or the baseline uses; empty where all are as they were."""
        for tensor, form in self._lent:
            if type(tensor) is not form.kind:
                return f"a tensor that the baseline is called with is a {type(tensor).__name__} now"
            if _form(tensor) != form:
                return "a tensor that the baseline is called with has other memory, strides or gradients now"
        return ""

    @property
    def refillable(self) -> bool:
        """Whether the operation says which values may change after a call that is prepared."""
        return numerics(self.case).refresh is not None

    def refill(self, seed: int) -> None:
        """New values everywhere. Nothing where the operation does not say how."""
        refresh = numerics(self.case).refresh
        if refresh is None:
            return
        self.seeds.append(seed)
        with torch.no_grad():
            self._written = [
                tensor
                for index, each in enumerate(self.sets)
                for tensor in refresh(self.case, each, _of(seed, index))
            ]
        self._sums = checksums(self._written)

    @property
    def changed(self) -> bool:
        """Whether anybody but ``refill`` has written since."""
        return checksums(self._written) != self._sums

    def earlier(self, number: int) -> list[Inputs]:
        """Copies of set ``number`` with the values that it had before, the latest first."""
        refresh = numerics(self.case).refresh
        copies = []
        for seed in reversed(self.seeds[:-1]):
            copy = _copied(self.sets[number])
            assert refresh is not None
            refresh(self.case, copy, _of(seed, number))
            copies.append(copy)
        return copies


def _of(seed: int, index: int) -> int:
    return derived_seed(seed, "set", index)


@dataclass(frozen=True)
class _Form:
    """Of a tensor, all but its values."""

    kind: type
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    has_gradient: bool


def _form(tensor: Tensor) -> _Form:
    return _Form(
        type(tensor), tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.requires_grad
    )


def _tensors(inputs: Inputs) -> dict[str, Tensor]:
    """By field."""
    return {
        field.name: value
        for field in dataclasses.fields(inputs)  # type: ignore[arg-type]  # every Inputs is a frozen dataclass
        if isinstance(value := getattr(inputs, field.name), Tensor)
    }


def _copied(inputs: Inputs) -> Inputs:
    changed = {name: tensor.clone() for name, tensor in _tensors(inputs).items()}
    copy: Inputs = dataclasses.replace(inputs, **changed)  # type: ignore[type-var]
    return copy


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Of the bits of each, eight bytes at a time where its memory is one piece of such."""
    return [_checksum(tensor.detach()) for tensor in tensors]


def _checksum(tensor: Tensor) -> int:
    offset_bytes = tensor.storage_offset() * tensor.element_size()
    if not tensor.is_contiguous() or tensor.nbytes % _WORD or offset_bytes % _WORD:
        return int(tensor.view(_BITS[tensor.element_size()]).sum(dtype=torch.int64))
    words = tensor.view(-1).view(torch.int64)
    # NumPy on a CPU: PyTorch would share the sum among its threads, which spin after it.
    return int(add.reduce(words.numpy())) if words.device.type == "cpu" else int(words.sum())
