"""What is found here before a machine elsewhere is asked for anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from cudadent42.base.errors import BuildFailedError, MachineNotReadyError, UsageError
from cudadent42.plan import Choices
from cudadent42.remote.core.checks import check_kernels, check_plan
from cudadent42.scaffold import Kind, create

OF_GPU, OF_CPU = (Choices("moe", cases=(name,)) for name in ("qwen3-30b-64", "coarse-16"))
"""On CPU another suite takes the place of ``moe``."""


@pytest.mark.parametrize(
    ("choices", "device"), [(OF_GPU, "auto"), (OF_GPU, "cuda"), (OF_CPU, "auto"), (OF_CPU, "cpu")]
)
def test_a_plan_is_looked_for_on_its_device(choices: Choices, device: str) -> None:
    check_plan(choices, device)


@pytest.mark.parametrize(
    ("choices", "device", "message"),
    [
        (OF_GPU, "cpu", "unknown case 'qwen3-30b-64'"),
        (OF_CPU, "cuda:1", "unknown case 'coarse-16'; the suite moe has"),
        (Choices("moe", cases=("neither",)), "auto", "unknown case 'neither'; the suite moe has"),
        (Choices("small"), "gpu", "expected auto, cpu, cuda or cuda:N"),
    ],
)
def test_a_plan_that_its_device_does_not_have(choices: Choices, device: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_plan(choices, device)


def test_gpus_that_preflight_would_refuse() -> None:
    with pytest.raises(MachineNotReadyError, match="sm_70, and sm_75 or newer is needed"):
        check_kernels(Choices("small"), ("sm_70", "sm_61"), print)


def test_what_cannot_be_compiled_here_is_said() -> None:
    said: list[str] = []
    check_kernels(Choices("small"), ("sm_999",), said.append)
    assert said[0].startswith("the kernels are not compiled here for sm_999 first: ")


@pytest.fixture
def own_kernel(tmp_path: Path, nvrtc: None) -> Path:
    create("mine", Kind.CUDA, tmp_path)
    return tmp_path / "mine"


def of_own_kernel(folder: Path) -> Choices:
    return Choices("small", dtypes=("bf16",), cases=("tiny",), implementations=(str(folder / "mine.toml"),))


def test_a_kernel_of_ones_own_is_compiled(own_kernel: Path) -> None:
    said: list[str] = []
    check_kernels(of_own_kernel(own_kernel), ("sm_70", "sm_90"), said.append)
    assert said == ["all kernels of this run compile for sm_90"]


def test_a_kernel_of_ones_own_that_does_not_compile(own_kernel: Path) -> None:
    (own_kernel / "mine.cu").write_text("this is no CUDA\n")
    said: list[str] = []
    with pytest.raises(BuildFailedError, match="does not compile for sm_90, so nothing was started"):
        check_kernels(of_own_kernel(own_kernel), ("sm_90",), said.append)
    assert "error" in said[0]
