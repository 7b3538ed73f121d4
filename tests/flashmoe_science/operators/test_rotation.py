"""The operator that rotates queries and keys: PyTorch's checks, its gradients, what it refuses."""

from __future__ import annotations

import pytest
import torch
from rotation_cases import CASES, Case, composed, exact
from torch.library import opcheck

from flashmoe_science import InputError
from flashmoe_science.operators.rotation import ROTATE


@pytest.mark.parametrize("needed", [(False, False), (True, True), (False, True)])
def test_it_passes_pytorchs_checks(needed: tuple[bool, bool]) -> None:
    query, key, cosine, sine = CASES["one projection"].make(torch.float64)
    query, key = (
        each.detach().requires_grad_(wanted) for each, wanted in zip((query, key), needed, strict=True)
    )
    opcheck(ROTATE, (query, key, cosine, sine))


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_on_the_cpu_it_is_exact(name: str, inverse: bool) -> None:
    tensors = CASES[name].make(torch.float64)
    for mine, right, tensor in zip(ROTATE(*tensors, inverse), exact(tensors, inverse), tensors, strict=False):
        torch.testing.assert_close(mine, right, rtol=1e-14, atol=1e-14)
        assert mine.stride() == torch.empty_like(tensor).stride()


def test_turning_back_undoes_it() -> None:
    query, key, cosine, sine = CASES["heads of two sequences"].make(torch.float64)
    there = ROTATE(query, key, cosine, sine)
    for mine, right in zip(ROTATE(*there, cosine, sine, True), (query, key), strict=True):
        torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("name", ["heads of two sequences", "one table for both halves", "one projection"])
def test_its_gradients_are_those_of_the_composition(name: str) -> None:
    """Gradients that are expanded, too, as a sum's are."""
    tensors = CASES[name].make(torch.float64)
    results = []
    for rotate in (ROTATE, lambda *given: composed(given)):
        query, key = (each.detach().requires_grad_() for each in tensors[:2])
        one, other = rotate(query, key, *tensors[2:])
        (one.sum() + (other * other.detach().cos()).sum()).backward()
        results.append((query.grad, key.grad))
    for mine, right in zip(*results, strict=True):
        assert mine is not None
        torch.testing.assert_close(mine, right)


def test_it_can_be_differentiated_twice() -> None:
    query, key, cosine, sine = Case(batch=1, tokens=2, heads=2, kv_heads=1, head_dim=4).make(torch.float64)
    query, key = (each.detach().requires_grad_() for each in (query, key))
    assert torch.autograd.gradgradcheck(lambda *given: ROTATE(*given, cosine, sine), (query, key))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 5, 64)}, "expected query and key"),
        ({"key": torch.zeros(2, 2, 4, 64)}, "key is \\(2, 2, 4, 64\\)"),
        ({"cosine": torch.zeros(2, 5, 16)}, "cosine and sine are"),
        ({"cosine": torch.zeros(2, 5, 64).double()}, "cosine is torch.float64"),
        ({"cosine": torch.zeros(2, 5, 64, requires_grad=True)}, "have no gradient"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, torch.Tensor], message: str) -> None:
    names = ("query", "key", "cosine", "sine")
    arguments = dict(zip(names, CASES["heads of two sequences"].make(torch.float32), strict=True))
    with pytest.raises(InputError, match=message):
        ROTATE(**arguments | change)
