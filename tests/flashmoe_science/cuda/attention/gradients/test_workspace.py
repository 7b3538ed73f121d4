"""What kernels of attention backward take beside the gradients, by their plans; `test_backward_gpu.py` measures it."""

from __future__ import annotations

import ctypes

import pytest
import torch
from emulated_launches import EmulatedMap

from flashmoe_science.cuda import launch
from flashmoe_science.cuda.attention.gradients import wgmma
from flashmoe_science.cuda.attention.gradients.backward import asked
from flashmoe_science.cuda.attention.gradients.problem import GradientKind
from flashmoe_science.cuda.attention.gradients.select import BACKWARD
from flashmoe_science.jit.nvrtc import CudaKernel
from problems import H200


class NoLauncher:
    """In the place of `cuda.launch.Launcher`: a buffer to write to."""

    def __init__(
        self, function: object, grid: object, kernel: CudaKernel, size: int, *, dependent: bool = False
    ) -> None:
        self.buffer = ctypes.create_string_buffer(size)

    def start(self, stream: int) -> None:
        """Nothing."""


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("kind", "head_dim"),
    [
        *((GradientKind.HOPPER, head_dim) for head_dim in (64, 128)),
        (GradientKind.TWO_PASS, 256),
        *((GradientKind.PORTABLE, head_dim) for head_dim in (64, 128, 256)),
    ],
)
def test_a_plan_takes_one_gradient_of_the_query_in_float32_and_statistics(
    kind: GradientKind, head_dim: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,560 rows are whole steps of every kernel. Others have the rest of a step besides."""
    monkeypatch.setattr(launch, "load", lambda *arguments, **options: None)
    monkeypatch.setattr(launch, "Launcher", NoLauncher)
    monkeypatch.setattr(wgmma, "TensorMap", EmulatedMap)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    query = torch.empty(2, 2, 2560, head_dim, dtype=torch.bfloat16, device="meta")
    problem, device = asked(query, query, query, causal, None, H200)
    module = BACKWARD.modules[kind]
    choice = module.choose(problem, device)
    assert choice is not None
    taken = module.plan(problem, choice.configuration, device).workspace_bytes
    sums = 4 * query.numel() if kind is GradientKind.HOPPER else 0
    lse_bytes = 4 * 2 * 2 * 2560
    assert sums + 2 * lse_bytes <= taken <= sums + 4 * lse_bytes
