"""Fresh values in the memory of a case's inputs: whatever a candidate keeps of earlier ones is then wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from cudadent42.base.seeds import derived_seed
from cudadent42.model.cases import Case
from cudadent42.operations import numerics
from cudadent42.operations.interface import Inputs

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size in bytes."""


class FreshInputs:
    """The sets of inputs of one case, written again and again where they are."""

    def __init__(self, case: Case, sets: Sequence[Inputs]) -> None:
        self.case = case
        self.sets = tuple(sets)
        self.seeds: list[int] = []
        """Of the values so far, the present ones' last."""
        self._sums: list[int] = []
        self._written: list[Tensor] = []

    @property
    def refillable(self) -> bool:
        """Whether the operation says which values may change behind a call that is prepared."""
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


def _copied(inputs: Inputs) -> Inputs:
    changed = {
        field.name: value.clone()
        for field in dataclasses.fields(inputs)  # type: ignore[arg-type]  # every Inputs is a frozen dataclass
        if isinstance(value := getattr(inputs, field.name), Tensor)
    }
    copy: Inputs = dataclasses.replace(inputs, **changed)  # type: ignore[type-var]
    return copy


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Of the bits of each."""
    return [int(tensor.view(_BITS[tensor.element_size()]).sum(dtype=torch.int64)) for tensor in tensors]
