"""DTensors over a mesh of two dimensions, as one of four processes sees them that only it believes in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from operator_calls import attention_tensors

from flashmoe_science import flash_attention

if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("placements", "kv_heads", "kept"),
    [
        ((Shard(0), Shard(1)), 2, True),
        ((Shard(0), Replicate()), 2, True),
        ((Shard(1), Shard(1)), 4, True),
        # Four parts of heads, two key/value heads: a query's head and its keys would not lie together.
        ((Shard(1), Shard(1)), 2, False),
    ],
    ids=str,
)
def test_what_is_sharded_by_batch_and_heads_stays_where_it_is(
    mesh: DeviceMesh, placements: tuple[Placement, ...], kv_heads: int, kept: bool
) -> None:
    over = [sum(each == Shard(dimension) for each in placements) for dimension in (0, 1)]
    batch, heads, kv = 4 >> over[0], 8 >> over[1], max(1, kv_heads >> over[1])
    tensors = attention_tensors(batch, heads, kv)
    parts = []
    for tensor, count in zip(tensors, (8, kv_heads, kv_heads), strict=True):
        shape = torch.Size((4, count, *tensor.shape[2:]))
        stride = torch.empty(shape, device="meta").stride()
        parts.append(
            DTensor.from_local(tensor, mesh, placements, run_check=False, shape=shape, stride=stride)
        )
    output = flash_attention(*parts, causal=True)
    assert isinstance(output, DTensor)
    assert output.shape == (4, 8, 20, 32)
    assert (output.placements == placements) == kept
    if kept:
        assert torch.equal(output.to_local(), flash_attention(*tensors, causal=True))  # type: ignore[arg-type]
