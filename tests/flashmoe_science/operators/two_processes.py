"""One of two processes that talk over gloo, or over NCCL with a GPU each: ``two_processes.py RANK FILE DEVICE CHECKS``.

Each check compares with the whole computed in one process, and raises where they differ.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from flashmoe_science import flash_attention, fused_moe, topk_routing

RANKS = 2


class Block(nn.Module):
    """Projections around attention, with grouped heads."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(64, (4 + 2 + 2) * 16)
        self.out = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.project(x).view(*x.shape[:2], 8, 16).transpose(1, 2)
        query, key, value = heads.split((4, 2, 2), dim=1)
        mixed = flash_attention(query, key, value, causal=True)
        assert isinstance(mixed, torch.Tensor)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


def model_and_data(device: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = nn.Sequential(Block(), Block()).to(device, dtype)
    return model, torch.randn(2 * RANKS, 24, 64).to(device, dtype)


def whole_gradients(device: str) -> list[torch.Tensor]:
    model, data = model_and_data(device)
    model(data).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def assert_like_whole(gradients: list[torch.Tensor], device: str) -> None:
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if device == "cpu" else {"rtol": 5e-2, "atol": 5e-3}
    for mine, whole in zip(gradients, whole_gradients(device), strict=True):
        torch.testing.assert_close(mine, whole, **tolerance)


def mine_of(data: torch.Tensor, rank: int) -> torch.Tensor:
    return data.chunk(RANKS)[rank]


def ddp(rank: int, device: str) -> None:
    for compiled in (False, True):
        model, data = model_and_data(device)
        parallel: nn.Module = DistributedDataParallel(model)
        if compiled:
            parallel = torch.compile(parallel, backend="aot_eager")  # type: ignore[assignment]
        parallel(mine_of(data, rank)).square().mean().backward()
        assert_like_whole([each.grad for each in model.parameters() if each.grad is not None], device)


def fsdp(rank: int, device: str) -> None:
    model, data = model_and_data(device)
    mesh = init_device_mesh(torch.device(device).type, (RANKS,))
    for block in model:  # type: ignore[attr-defined]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(mine_of(data, rank)).square().mean().backward()
    gradients = [each.grad for each in model.parameters()]
    assert all(isinstance(each, DTensor) for each in gradients)
    assert_like_whole([each.full_tensor() for each in gradients if isinstance(each, DTensor)], device)


def tensors(device: str) -> list[torch.Tensor]:
    torch.manual_seed(1)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    shapes = (2, 4, 24, 32), (2, 2, 40, 32), (2, 2, 40, 32)
    return [torch.randn(*shape).to(device, dtype).requires_grad_() for shape in shapes]


def sharded_attention(rank: int, device: str) -> None:
    mesh = init_device_mesh(torch.device(device).type, (RANKS,))
    whole = tensors(device)
    out, lse = flash_attention(*whole, causal=True, return_lse=True)
    (out.float().square().sum() + lse.sum()).backward()
    for placement in (Shard(0), Shard(1), Replicate()):
        parts = [
            distribute_tensor(each.detach(), mesh, [placement]).requires_grad_() for each in tensors(device)
        ]
        mine, mine_lse = flash_attention(*parts, causal=True, return_lse=True)
        assert isinstance(mine, DTensor)
        assert mine.placements == (placement,), mine.placements
        torch.testing.assert_close(mine.full_tensor(), out)
        torch.testing.assert_close(mine_lse.full_tensor(), lse)
        (mine.float().square().sum() + mine_lse.sum()).backward()
        for part, each in zip(parts, whole, strict=True):
            assert part.grad is not None
            assert part.grad.placements == (placement,), part.grad.placements
            torch.testing.assert_close(part.grad.full_tensor(), each.grad)
    # What a rule does not cover is brought together first: rows of keys, and heads whose keys are elsewhere.
    odd = [each[:, :1] if index else each for index, each in enumerate(tensors(device))]
    expected = flash_attention(*(each.detach() for each in odd))
    for placements in ((Shard(1), Replicate(), Replicate()), (Replicate(), Shard(2), Shard(2))):
        parts = [
            distribute_tensor(each.detach(), mesh, [placement])
            for each, placement in zip(odd, placements, strict=True)
        ]
        result = flash_attention(*parts)
        assert isinstance(result, DTensor)
        torch.testing.assert_close(result.full_tensor(), expected)
    with torch.inference_mode():
        parts = [distribute_tensor(each.detach(), mesh, [Shard(1)]) for each in tensors(device)]
        result = flash_attention(*parts, causal=True)
        assert isinstance(result, DTensor)
        assert result.placements == (Shard(1),)


def sharded_experts(rank: int, device: str) -> None:
    mesh = init_device_mesh(torch.device(device).type, (RANKS,))
    torch.manual_seed(2)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    hidden, w13, w2 = (
        (torch.randn(*shape) / 8).to(device, dtype) for shape in ((6, 64), (4, 64, 64), (4, 64, 32))
    )
    logits = torch.randn(6, 4).to(device)
    bias = torch.randn(4).to(device)
    weights, ids = topk_routing(logits, 2, scores="sigmoid", correction_bias=bias)
    expected = fused_moe(hidden, w13, w2, weights, ids)
    for placement in (Shard(0), Replicate()):

        def part(tensor: torch.Tensor, placement: Shard | Replicate = placement) -> DTensor:
            return distribute_tensor(tensor, mesh, [placement])

        def everywhere(tensor: torch.Tensor) -> DTensor:
            return distribute_tensor(tensor, mesh, [Replicate()])

        routing = topk_routing(part(logits), 2, scores="sigmoid", correction_bias=everywhere(bias))
        result = fused_moe(part(hidden), everywhere(w13), everywhere(w2), *routing)
        assert isinstance(result, DTensor)
        assert result.placements == (placement,)
        torch.testing.assert_close(result.full_tensor(), expected)


def sharded_expert_gradients(rank: int, device: str) -> None:
    """Those of tokens lie where the tokens do; those of the weights, which all have, are the parts' sums."""
    mesh = init_device_mesh(torch.device(device).type, (RANKS,))
    torch.manual_seed(3)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    shapes = (6, 64), (4, 64, 64), (4, 64, 32), (6, 4)
    whole = [(torch.randn(*shape) / 8).to(device, dtype).requires_grad_() for shape in shapes]

    def loss(hidden: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        output = fused_moe(hidden, w13, w2, *topk_routing(logits, 2))
        return output.float().square().sum()

    loss(*whole).backward()
    for placement in (Shard(0), Replicate()):
        placements = (placement, Replicate(), Replicate(), placement)
        parts = [
            distribute_tensor(each.detach(), mesh, [own]).requires_grad_()
            for each, own in zip(whole, placements, strict=True)
        ]
        loss(*parts).backward()
        for part, own, each in zip(parts, placements, whole, strict=True):
            assert isinstance(part.grad, DTensor)
            assert isinstance(own, Replicate) or part.grad.placements == (own,), part.grad.placements
            torch.testing.assert_close(part.grad.full_tensor(), each.grad)


def compiled_sharded_attention(rank: int, device: str) -> None:
    mesh = init_device_mesh(torch.device(device).type, (RANKS,))
    parts = [distribute_tensor(each.detach(), mesh, [Shard(1)]).requires_grad_() for each in tensors(device)]

    def loss(*parts: torch.Tensor) -> torch.Tensor:
        out = flash_attention(*parts, causal=True)
        assert isinstance(out, torch.Tensor)
        return out.square()

    expected = torch.autograd.grad(loss(*parts).sum(), parts)
    result = torch.compile(loss, backend="aot_eager", fullgraph=True)(*parts)
    for mine, other in zip(torch.autograd.grad(result.sum(), parts), expected, strict=True):
        assert isinstance(mine, DTensor)
        assert isinstance(other, DTensor)
        torch.testing.assert_close(mine.full_tensor(), other.full_tensor())


CHECKS = {
    check.__name__: check
    for check in (
        ddp,
        fsdp,
        sharded_attention,
        sharded_experts,
        sharded_expert_gradients,
        compiled_sharded_attention,
    )
}


def main() -> None:
    rank, file, kind, names = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4].split(",")
    torch.set_num_threads(1)
    device = kind if kind == "cpu" else f"cuda:{rank}"
    if kind == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo" if kind == "cpu" else "nccl", init_method=f"file://{file}", rank=rank, world_size=RANKS
    )
    try:
        for name in names:
            CHECKS[name](rank, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # gloo's threads drop the last tensors on their own time. One that comes while Python shuts down asks for its lock,
    # is ended there, and takes the process with it: https://github.com/pytorch/pytorch/issues/190489.
    sys.stdout.flush()
    os._exit(0)
