"""The kernels of attention's backward pass for tests of any: flash_attention's gradients by one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from emulated import NEEDS_COMPILER
from emulated_hopper_backward import emulate

from flashmoe_science.configs.attention import backward as portable_configs
from flashmoe_science.cpu import attention as cpu
from flashmoe_science.cuda import attention as cuda
from flashmoe_science.cuda.attention import gradients
from flashmoe_science.cuda.attention.gradients.backward import _make_call, _problem
from flashmoe_science.cuda.attention.gradients.problem import BackwardProblem, GradientKind, is_readable
from flashmoe_science.cuda.attention.gradients.select import BACKWARD
from flashmoe_science.cuda.attention.problem import strides_of
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import Device, device_of
from flashmoe_science.gradients import Gradients, Needs, with_contiguous_rows
from problems import H200

CPU, CUDA = "cpu", "cuda"
EMULATED_GPU = dataclasses.replace(H200, multiprocessors=4)
"""As many blocks run side by side: more than tiles of a head, which wait for each other."""
Change = Callable[[Choice, BackwardProblem, Device], Choice | None]


class Kernel(NamedTuple):
    """Where tensors are, and what computes their gradients."""

    device: str
    head_dim: int = 64
    kind: GradientKind | None = None
    """None: the kernel that a call gets."""
    change: Change | None = None
    """The kernel's configuration for a call, of its usual one; None where it has none."""

    @property
    def is_emulated(self) -> bool:
        return self.device == CPU and self.kind is not None

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.kind is None and self.device == CPU else torch.bfloat16


def _wide(choice: Choice, problem: BackwardProblem, device: Device) -> Choice:
    """Steps of 80 query rows, which are chosen where keys are many."""
    tile = dataclasses.replace(choice.configuration, wide=True, staggered=False, converts=False)
    return dataclasses.replace(choice, configuration=tile)


def _one_pass(choice: Choice, problem: BackwardProblem, device: Device) -> Choice | None:
    tiles = portable_configs.configuration(device.architecture, problem.head_dim)
    return None if tiles.single is None else dataclasses.replace(choice, configuration=tiles)


def _two_passes(choice: Choice, problem: BackwardProblem, device: Device) -> Choice:
    tiles = dataclasses.replace(choice.configuration, single=None)
    return dataclasses.replace(choice, configuration=tiles)


_HOPPERS: dict[str, tuple[int, GradientKind, Change | None]] = {
    "short, 64": (64, GradientKind.SHORT, None),
    "Hopper, 64": (64, GradientKind.HOPPER, None),
    "Hopper, 128": (128, GradientKind.HOPPER, None),
    "Hopper of 80 rows, 128": (128, GradientKind.HOPPER, _wide),
    "two passes, 256": (256, GradientKind.TWO_PASS, None),
}
_PORTABLE: dict[str, tuple[int, GradientKind, Change | None]] = {
    f"portable {name}, {head_dim}": (head_dim, GradientKind.PORTABLE, change)
    for name, change in (("in one pass", _one_pass), ("in two passes", _two_passes))
    for head_dim in (64, 128, 256)
}
ON_CPU = pytest.param(Kernel(CPU), id="cpu")
ON_GPU = [
    pytest.param(Kernel(CUDA), id="chosen", marks=pytest.mark.gpu),
    *(
        pytest.param(Kernel(CUDA, *kernel), id=name, marks=pytest.mark.gpu)
        for name, kernel in (_HOPPERS | _PORTABLE).items()
    ),
]
EMULATED = [
    pytest.param(Kernel(CPU, *kernel), id=f"{name}, emulated", marks=NEEDS_COMPILER)
    for name, kernel in _HOPPERS.items()
]


def use(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of flash_attention are this kernel's. A call that it does not take skips its test."""
    if kernel.kind is None:
        return
    if kernel.is_emulated:
        emulate(monkeypatch)
        of_calls = _make_call.__globals__
        monkeypatch.setitem(of_calls, "make_context_current", lambda index: None)
        monkeypatch.setitem(of_calls, "device_of", lambda index: EMULATED_GPU)
        monkeypatch.setitem(of_calls, "raw_stream", lambda device: 0)
        monkeypatch.setitem(of_calls, "cuda_allocator", lambda: aligned)

    def backward(
        grad_output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        grad_lse: torch.Tensor | None,
        *,
        causal: bool,
        softmax_scale: float | None,
        needs: Needs,
    ) -> Gradients:
        tensors = query, key, value, output
        plain = with_contiguous_rows(*tensors)  # as the call makes them
        device = EMULATED_GPU if kernel.is_emulated else device_of(query.get_device())
        like = (
            grad_output if is_readable(grad_output) else torch.empty_like(output, device="meta").contiguous()
        )
        assert len(plain) == 4
        problem = _problem(plain, strides_of("grad_output", like), causal, softmax_scale, needs)
        choice = choice_of(kernel, problem, device)
        if choice is None:
            pytest.skip(f"{kernel.kind} does not take this here")
        options: dict[str, Any] = {"causal": causal, "softmax_scale": softmax_scale, "needs": needs}
        if not kernel.is_emulated:
            return gradients.backward(grad_output, *tensors, lse, grad_lse, **options, choice=choice)
        given = (*tensors, lse, grad_output, *(() if grad_lse is None else (grad_lse,)))
        results = _make_call(given, (*options.values(), (-1, -1), 0.0, choice), 0)(*given)
        return results[0], results[1], results[2]

    monkeypatch.setattr(cpu if kernel.is_emulated else cuda, "backward", backward)


def takes(kernel: Kernel, query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether the kernel takes the gradients of causal attention with such tensors, on an H200."""
    strides = strides_of("grad_output", query)
    problem = _problem((query, key, key, query), strides, True, None, Needs(True, True, True))
    return choice_of(kernel, problem, EMULATED_GPU) is not None


def choice_of(kernel: Kernel, problem: BackwardProblem, device: Device) -> Choice | None:
    assert kernel.kind is not None
    choice = BACKWARD.modules[kernel.kind].choose(problem, device)
    if choice is None or kernel.change is None:
        return choice
    return kernel.change(choice, problem, device)


def aligned(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory at a multiple of 256 bytes, as on a GPU, that held NaN."""
    count = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    memory = torch.full((count * dtype.itemsize + 256,), 0xFF, dtype=torch.uint8)
    start = -memory.data_ptr() % 256
    return memory[start : start + count * dtype.itemsize].view(dtype).as_strided(size, stride)
