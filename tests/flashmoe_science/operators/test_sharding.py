"""DTensors, DDP and FSDP2 of one process: what the rules say of a call, and of the next one with the same shapes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from moe_reference import make_moe
from operator_calls import attention_tensors

from flashmoe_science import flash_attention, fused_moe, topk_routing

if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

TOKENS = (Shard(0), Replicate(), Replicate(), Shard(0))
"""Of hidden states, both weights and routing weights."""


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        yield init_device_mesh("cpu", (1,))
        torch.distributed.destroy_process_group()


def leaf(
    tensor: torch.Tensor, needed: bool, mesh: DeviceMesh | None, placement: Placement | None = None
) -> torch.Tensor:
    """A copy that may need a gradient, as a DTensor where there is a placement."""
    own = tensor.detach().clone()
    if mesh is not None and placement is not None:
        own = distribute_tensor(own, mesh, [placement])
    return own.requires_grad_(needed)


def local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_alike(parts: list[torch.Tensor], whole: list[torch.Tensor]) -> None:
    """In their gradients: of the same tensors, and with the same numbers."""
    for part, each in zip(parts, whole, strict=True):
        assert (part.grad is None) == (each.grad is None)
        if part.grad is not None:
            assert isinstance(part.grad, DTensor)
            torch.testing.assert_close(local(part.grad), each.grad)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_any_gradients_of_attention_may_be_needed_after_any_others(
    mesh: DeviceMesh, placement: Placement
) -> None:
    tensors = attention_tensors()
    for needed in (*itertools.product((False, True), repeat=3), (True, False, False)):
        if not any(needed):
            continue
        whole = [leaf(*each, None) for each in zip(tensors, needed, strict=True)]
        parts = [leaf(*each, mesh, placement) for each in zip(tensors, needed, strict=True)]
        flash_attention(*whole, causal=True).square().sum().backward()  # type: ignore[union-attr]
        output = flash_attention(*parts, causal=True)
        assert isinstance(output, DTensor)
        assert output.placements == (placement,)
        output.square().sum().backward()
        assert_alike(parts, whole)


def test_any_gradients_of_experts_may_be_needed_after_any_others(mesh: DeviceMesh) -> None:
    """Also where z is kept in one call and computed again in the next."""
    *floats, ids = make_moe(6, 32, 48, 4, 2).tensors
    for needed, recompute in itertools.product(
        [(True, False, False, False), (False, True, False, True), (True, True, True, True)], (False, True)
    ):
        whole = [leaf(*each, None) for each in zip(floats, needed, strict=True)]
        parts = [
            leaf(tensor, want, mesh, placement)
            for tensor, want, placement in zip(floats, needed, TOKENS, strict=True)
        ]
        chosen = distribute_tensor(ids, mesh, [Shard(0)])
        fused_moe(*whole, ids, recompute=recompute).square().sum().backward()
        output = fused_moe(*parts, chosen, recompute=recompute)
        assert isinstance(output, DTensor)
        assert output.placements == (Shard(0),)
        output.square().sum().backward()
        assert_alike(parts, whole)


def test_a_bias_of_experts_is_told_from_another(mesh: DeviceMesh) -> None:
    """Where each is alone and both have one shape."""
    made = make_moe(6, 32, 16, 4, 2, biased=True)
    biases = made.biases
    assert biases["w13_bias"].shape == biases["w2_bias"].shape
    *floats, ids = made.tensors
    for name, bias in biases.items():
        whole = [*(leaf(each, True, None) for each in floats), leaf(bias, True, None)]
        parts = [
            *(leaf(each, True, mesh, own) for each, own in zip(floats, TOKENS, strict=True)),
            leaf(bias, True, mesh, Replicate()),
        ]
        fused_moe(*whole[:4], ids, **{name: whole[4]}).square().sum().backward()
        chosen = distribute_tensor(ids, mesh, [Shard(0)])
        fused_moe(*parts[:4], chosen, **{name: parts[4]}).square().sum().backward()
        assert_alike(parts, whole)


def test_a_routers_choice_and_its_gradient(mesh: DeviceMesh) -> None:
    logits = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    for count, renormalize in itertools.product((2, 3), (True, False)):
        whole, part = leaf(logits, True, None), leaf(logits, True, mesh, Shard(0))
        weights, ids = topk_routing(whole, count, renormalize=renormalize)
        own_weights, own_ids = topk_routing(part, count, renormalize=renormalize)
        assert isinstance(own_weights, DTensor)
        assert own_weights.placements == (Shard(0),)
        torch.testing.assert_close(local(own_weights), weights)
        assert torch.equal(own_ids.full_tensor(), ids)  # type: ignore[attr-defined]
        weights.square().sum().backward()
        own_weights.square().sum().backward()
        assert_alike([part], [whole])


class Block(torch.nn.Module):
    """Projections around attention, then experts over its output."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.router = torch.nn.Linear(32, 3 * 32), torch.nn.Linear(32, 4, bias=False)
        self.w13 = torch.nn.Parameter(torch.randn(4, 2 * 16, 32) / 6)
        self.w2 = torch.nn.Parameter(torch.randn(4, 32, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.project(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
        mixed = flash_attention(*heads.unbind(), causal=True)
        assert isinstance(mixed, torch.Tensor)
        tokens = (x + mixed.transpose(1, 2).reshape(x.shape)).flatten(0, 1)
        mixture = fused_moe(tokens, self.w13, self.w2, *topk_routing(self.router(tokens), 2))
        return x + mixture.view(x.shape)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_block_trains_under_ddp_and_fsdp_as_alone(mesh: DeviceMesh, kind: str) -> None:
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(Block(), Block()) for _ in range(2)]
    blocks[1].load_state_dict(blocks[0].state_dict())
    alone, own = blocks
    if kind == "fsdp":
        for block in own:
            fully_shard(block, mesh=mesh)
        fully_shard(own, mesh=mesh)
    parallel = DistributedDataParallel(own) if kind == "ddp" else own
    data = torch.randn(2, 5, 32)
    for model in (alone, parallel):
        for _ in range(2):  # gradients are added to
            model(data).square().mean().backward()
    for one, other in zip(alone.parameters(), own.parameters(), strict=True):
        assert isinstance(other.grad, DTensor) == (kind == "fsdp")
        torch.testing.assert_close(local(other.grad), one.grad)
