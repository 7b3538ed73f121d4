"""Attention with a window, a cap and sinks as an operator: checks of PyTorch, compiling, transforms, DTensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from operator_calls import Tensors, attention_tensors, differentiable, random
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from flashmoe_science import InputError, flash_attention
from flashmoe_science.operators.attention_options import BACKWARD, FORWARD

OPTIONS: list[dict[str, Any]] = [
    {"window": (7, 2)},
    {"causal": True, "window": (9, -1), "softcap": 2.5},
    {"softcap": 3.0, "softmax_scale": -0.3},
    {"causal": True},
]
each_options = pytest.mark.parametrize("options", OPTIONS, ids=str)


def sinks() -> torch.Tensor:
    return torch.tensor([0.0, 1.0, -torch.inf, 3.0])


def loss(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, of_sinks: torch.Tensor, **options: Any
) -> Any:
    output, lse = flash_attention(query * 2, key, value, sinks=of_sinks, return_lse=True, **options)
    return output.square().sum() + lse.masked_fill(lse == -torch.inf, 0).sum()


def leaves(seqlen: int = 20) -> Tensors:
    return (
        *differentiable(attention_tensors(seqlen_q=seqlen, seqlen_k=seqlen + 10)),
        sinks().requires_grad_(),
    )


@pytest.mark.parametrize("needed", [(False,) * 4, (True,) * 4, (False, True, False, False)], ids=str)
def test_the_forward_operator_passes_all_checks(needed: tuple[bool, ...]) -> None:
    tensors = differentiable((*attention_tensors(), sinks()), needed)
    opcheck(FORWARD, (*tensors, (7, 0), 2.0, 0.3))
    opcheck(FORWARD, (*differentiable(attention_tensors(), needed[:3]), None, (7, -1)))


@pytest.mark.parametrize(
    "needs", [(True,) * 4, (False, True, False, False), (False, False, False, True)], ids=str
)
@pytest.mark.parametrize("options", [((7, 0), 2.0), ((-1, -1), 0.0)], ids=str)
def test_the_backward_operator_passes_all_checks(options: tuple[Any, ...], needs: tuple[bool, ...]) -> None:
    tensors = attention_tensors()
    output, lse = FORWARD(*tensors, sinks(), *options)
    grad_lse = random(2, 4, 20) if all(needs) else None
    opcheck(
        BACKWARD, (random(*output.shape), *tensors, output, lse, sinks(), grad_lse, *options, None, needs)
    )


@each_options
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_call_and_its_gradients_are_one_graph(dynamic: bool, options: dict[str, Any]) -> None:
    torch.compiler.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for seqlen in (20, 33):
        tensors = leaves(seqlen)
        expected = torch.autograd.grad(loss(*tensors, **options), tensors)
        for mine, right in zip(
            torch.autograd.grad(compiled(*tensors, **options), tensors), expected, strict=True
        ):
            torch.testing.assert_close(mine, right, rtol=0, atol=0)


def test_without_sinks_and_without_gradients() -> None:
    torch.compiler.reset()
    tensors = attention_tensors()
    compiled = torch.compile(flash_attention, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(*tensors, window=(3, 0)), flash_attention(*tensors, window=(3, 0)))  # type: ignore[arg-type]


def test_wrong_options_are_named_in_what_the_compiler_raises() -> None:
    torch.compiler.reset()
    compiled = torch.compile(flash_attention, backend="aot_eager", fullgraph=True)
    for wrong, words in (
        ({"softcap": -1.0}, "softcap is -1"),
        ({"sinks": torch.zeros(3)}, r"sinks has shape \(3,\)"),
        ({"window": (-2, 0)}, r"window is \(-2, 0\)"),
    ):
        with pytest.raises(Exception, match=words):
            compiled(*attention_tensors(), **wrong)


@pytest.mark.parametrize("mapped", [(0, 0, 0), (1, None, None), (None, 0, 2)], ids=str)
def test_vmap(mapped: tuple[int | None, ...]) -> None:
    tensors = attention_tensors()
    stacks = [
        tensor if dimension is None else torch.stack([tensor, tensor * 2, tensor * 3], dimension)
        for tensor, dimension in zip(tensors, mapped, strict=True)
    ]

    def call(*tensors: torch.Tensor) -> Any:
        return flash_attention(
            *tensors, causal=True, window=(7, -1), softcap=2.0, sinks=sinks(), return_lse=True
        )

    results = torch.func.vmap(call, in_dims=mapped)(*stacks)
    for index in range(3):
        one = [
            tensor if dimension is None else tensor.select(dimension, index).contiguous()
            for tensor, dimension in zip(stacks, mapped, strict=True)
        ]
        for result, expected in zip(results, call(*one), strict=True):
            assert torch.equal(result[index], expected)


def test_gradients_of_each_sample() -> None:
    stacks = [torch.stack([tensor, tensor * 2]) for tensor in attention_tensors()]

    def of_sample(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        return loss(query, key, value, sinks(), window=(7, 2), softcap=2.0)

    gradients = torch.func.vmap(torch.func.grad(of_sample, argnums=(0, 1, 2)))(*stacks)
    for index in range(2):
        samples = differentiable(tuple(stack[index] for stack in stacks))
        for mine, expected in zip(gradients, torch.autograd.grad(of_sample(*samples), samples), strict=True):
            torch.testing.assert_close(mine[index], expected)


def test_mapped_sinks_are_refused() -> None:
    tensors = attention_tensors()
    with pytest.raises(InputError, match=r"sinks are mapped by torch\.func\.vmap"):
        torch.func.vmap(lambda each: flash_attention(*tensors, sinks=each))(torch.zeros(2, 4))


def test_second_derivatives_inside_a_transform_are_refused() -> None:
    query, key, value = attention_tensors()

    def first(query: torch.Tensor) -> Any:
        return torch.func.grad(lambda query: loss(query, key, value, sinks(), window=(7, 2)))(query).sum()

    with pytest.raises(InputError, match=r"first derivatives only; .* compose") as raised:
        torch.func.grad(first)(query)
    assert "SDPBackend" not in str(raised.value)  # which has neither sinks nor caps


def test_operations_are_counted() -> None:
    tensors = leaves()
    with FlopCounterMode(display=False) as counter:
        loss(*tensors, window=(7, 2)).backward()
    product = 2 * 2 * 4 * 20 * 30 * 32
    assert counter.get_total_flops() == 7 * product


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        yield init_device_mesh("cpu", (1,))
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_dtensors_by_batch_and_by_heads(mesh: DeviceMesh, placement: Placement) -> None:
    of_sinks = Shard(0) if placement == Shard(1) else Replicate()
    for needed in itertools.product((False, True), repeat=4):
        if not any(needed):
            continue
        whole = differentiable((*attention_tensors(), sinks()), needed)
        parts = [
            distribute_tensor(tensor.detach().clone(), mesh, [each]).requires_grad_(need)
            for tensor, each, need in zip(whole, (*[placement] * 3, of_sinks), needed, strict=True)
        ]
        output = flash_attention(*parts[:3], sinks=parts[3], causal=True, window=(9, -1))
        assert isinstance(output, DTensor)
        assert output.placements == (placement,)
        output.square().sum().backward()
        flash_attention(*whole[:3], sinks=whole[3], causal=True, window=(9, -1)).square().sum().backward()  # type: ignore[union-attr]
        for part, each in zip(parts, whole, strict=True):
            assert (part.grad is None) == (each.grad is None)
            if part.grad is not None:
                torch.testing.assert_close(part.grad.full_tensor(), each.grad)  # type: ignore[attr-defined]
