"""What autograd calls on CUDA: which of the two backward passes takes what was kept. Tensors of the CPU stand in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_reference import make_moe

from flashmoe_science.cuda.moe import training
from flashmoe_science.moe_arguments import Activation, W13Layout
from flashmoe_science.moe_gradients import MoeGradients, MoeNeeds, MoeTensors

ALL = MoeNeeds(True, True, True, True)
MOE = make_moe(6, 32, 16, 5, 2)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """The backward passes that were called, with their tensors."""
    calls: list[tuple[str, tuple[Any, ...]]] = []

    def watch(name: str) -> Any:
        def call(*tensors: Any, **options: Any) -> MoeGradients:
            calls.append((name, tensors))
            return MoeGradients(None, None, None, None)

        return call

    monkeypatch.setattr(training.gradients, "backward", watch("kernels"))
    monkeypatch.setattr(training, "composed_backward", watch("composed"))
    return calls


def backward(
    tensors: tuple[torch.Tensor, ...], z: torch.Tensor | None, w13_bias: torch.Tensor | None = None
) -> None:
    training.backward(
        torch.ones(6, 32),
        MoeTensors(*tensors, w13_bias),
        z,
        activation=Activation.SILU,
        w13_layout=W13Layout.INTERLEAVED,
        needs=ALL,
    )


@pytest.mark.parametrize("able", [False, True])
def test_what_kernels_kept_goes_to_kernels(
    able: bool, taken: list[tuple[str, tuple[Any, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a variable says otherwise by then: the order of its columns is theirs."""
    monkeypatch.setattr(training.gradients, "can_differentiate", lambda *tensors, **options: able)
    z = torch.randn(12, 32)
    backward(MOE.tensors, z)
    backward(MOE.tensors, None)
    backward(MOE.tensors, z, torch.zeros(5, 32))
    assert [name for name, _ in taken] == ["kernels", "kernels" if able else "composed", "kernels"]
    assert taken[0][1][6] is z
    assert taken[2][1][6] is z


def test_what_hooks_restored_with_other_strides_is_made_contiguous(
    taken: list[tuple[str, tuple[Any, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training.gradients, "can_differentiate", lambda *tensors, **options: True)
    turned = tuple(tensor.mT.contiguous().mT for tensor in MOE.tensors)
    assert not turned[0].is_contiguous()
    z = torch.randn(32, 12).t()
    backward(turned, z)
    (_, (_, *given)) = taken[0]
    for tensor, expected in zip(given, (*MOE.tensors, z), strict=True):
        assert tensor.is_contiguous()
        assert torch.equal(tensor, expected)
