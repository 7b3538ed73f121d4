"""The steady state of a CUDA call, as far as it can be had on CPU tensors."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flashmoe_science.cuda import repeat
from flashmoe_science.cuda.launch import Launch, LaunchPlan
from flashmoe_science.errors import InputError


def allocate(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype)


INPUTS = {"left": 16, "right": 4}


def layout(*sizes: int, dtype: torch.dtype = torch.float32) -> repeat.Layout:
    return repeat.layout_of(torch.empty(sizes, dtype=dtype, device="meta"))


def ready(launch: Launch, *results: repeat.Layout | None, workspace_bytes: int = 0) -> repeat.Call:
    return repeat.prepare(INPUTS, results, LaunchPlan(launch, workspace_bytes), 0, allocate)


def test_a_call_allocates_its_results_and_launches_on_them() -> None:
    launched: list[tuple[int, ...]] = []
    call = ready(
        lambda *addresses: launched.append(addresses),
        layout(2, 3),
        None,
        layout(5, dtype=torch.float16),
        workspace_bytes=256,
    )
    left, right = torch.zeros(4), torch.zeros(6)
    first, absent, last = call(left, right)
    assert absent is None
    assert (first.shape, first.dtype, last.shape, last.dtype) == ((2, 3), torch.float32, (5,), torch.float16)
    (*given, workspace, stream) = launched[0]
    assert given == [left.data_ptr(), right.data_ptr(), first.data_ptr(), 0, last.data_ptr()]
    assert workspace not in (0, *given)
    assert stream == 0


def test_misaligned_tensors_are_named() -> None:
    call = ready(lambda *addresses: None)
    left, right = torch.zeros(8), torch.zeros(8)
    assert call(left, right[1:]) == ()
    with pytest.raises(InputError, match="left does not start at a multiple of 16"):
        call(left[1:], right)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_what_has_no_memory_is_named_and_not_launched() -> None:
    """A kernel that reads address 0 takes the process's use of the GPU with it."""
    launched: list[tuple[int, ...]] = []
    call = ready(lambda *addresses: launched.append(addresses))
    with FakeTensorMode():
        fake = torch.zeros(8)
    with pytest.raises(InputError, match="right has no memory"):
        call(torch.zeros(8), fake)
    assert launched == []
    call(torch.zeros(8), torch.zeros(0))
    assert len(launched) == 1
