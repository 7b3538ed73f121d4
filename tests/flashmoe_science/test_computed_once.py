"""A reference is computed again for whatever could change it, and nobody can spoil what others are given."""

from __future__ import annotations

import torch
from moe_reference import Moe

from computed_once import computed_once
from flashmoe_science.moe_arguments import Activation


def test_only_the_same_arguments_share_a_result() -> None:
    calls = []

    @computed_once
    def total(*given: object, factor: float = 1.0, activation: Activation = Activation.SILU) -> torch.Tensor:
        calls.append(given)
        return torch.full((3,), float(len(calls)), dtype=torch.float64)

    numbers = torch.arange(6.0).view(2, 3)
    first = total(numbers)
    assert torch.equal(total(numbers.clone()), first)
    assert len(calls) == 1
    others = (
        numbers + 1,
        numbers.view(3, 2),
        numbers.double(),
        numbers.T.contiguous().T,
        numbers.view(torch.int32),
    )
    for count, other in enumerate(others, 2):
        total(other)
        assert len(calls) == count
    for options in (
        {"factor": 2.0},
        {"activation": Activation.GELU},
        {"factor": 2.0, "activation": Activation.GELU},
    ):
        before = len(calls)
        total(numbers, **options)
        assert len(calls) == before + 1
    for structure in ((numbers, None), ((numbers,), None), (Moe(*[numbers] * 5),), (Moe(*[numbers] * 6),)):
        before = len(calls)
        total(*structure)
        total(*structure)
        assert len(calls) == before + 1


def test_what_a_caller_writes_stays_his() -> None:
    @computed_once
    def pair(given: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return given + 1, [given + 2]

    one, (other,) = pair(torch.zeros(2))
    one.fill_(9)
    other.fill_(9)
    one, (other,) = pair(torch.zeros(2))
    assert one.tolist() == [1, 1]
    assert other.tolist() == [2, 2]


def test_what_autograd_records_is_computed_again() -> None:
    @computed_once
    def squared(given: torch.Tensor) -> torch.Tensor:
        return given.square()

    for _ in range(2):
        leaf = torch.ones(2, requires_grad=True)
        squared(leaf).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [2, 2]
