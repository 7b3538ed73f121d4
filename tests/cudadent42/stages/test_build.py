from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cudadent42.base.errors import MachineNotReadyError, UsageError
from cudadent42.commands.tables import build_line, build_tables, recipe_lines
from cudadent42.operations.attention import OPERATION
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.operations.attention_backward import OPERATION as GRADIENTS
from cudadent42.operations.attention_backward.case import AttentionBackwardCase
from cudadent42.operations.cuda_kernels import kernels
from cudadent42.plan import Choices, make_plan
from cudadent42.preflight.toolchain import nvrtc_version
from cudadent42.registry import registry
from cudadent42.stages.build import build, build_for, check_architectures, choose_device
from flashmoe_science.errors import BuildError
from flashmoe_science.jit import nvrtc
from flashmoe_science.jit.nvrtc import CudaKernel
from flashmoe_science.jit.requirements import install_command


class Progress:
    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int, what: str) -> None:
        assert what
        self.told.append((done, total))


def test_the_cpu_kernel_is_built_with_its_recipe() -> None:
    report = build("cpu", (), Progress())
    assert report.passed
    attention = next(item for item in report.kernels if item.recipe.kernel == "attention_forward")
    assert attention.artifact.is_file()
    assert attention.recipe.compiler_version
    assert "attention_forward.cpp" in attention.recipe.sources
    assert any("attention_forward.cpp sha256:" in line for line in recipe_lines(report))
    again = build("cpu", (), Progress())
    assert all(item.cached for item in again.kernels)
    assert "0 compiled" in build_line(again)
    assert sum(table.row_count for _, table in build_tables(again)) == len(again.kernels)


def test_only_what_the_cases_can_lead_to_is_built() -> None:
    kernels = OPERATION.cuda_kernels(["sm_80"])
    case = AttentionCase("c", "bf16", 1, 1, 1, 64, 64, 72)
    needed = OPERATION.needed(kernels, [case])
    assert {kernel.function for kernel in needed} == {kernel.function for kernel in kernels}
    assert {kernel.macros["ELEMENT_BF16"] for kernel in needed} == {1}
    for function in {kernel.function for kernel in kernels}:
        sizes = {kernel.macros["HEAD_DIM"] for kernel in kernels if kernel.function == function}
        kept = {kernel.macros["HEAD_DIM"] for kernel in needed if kernel.function == function}
        assert kept == {min(size for size in sizes if size >= 72)}
    assert OPERATION.needed(kernels, [replace(case, dtype="fp32"), replace(case, head_dim=512)]) == []


@pytest.mark.usefixtures("nvrtc")  # what is built for sm_90 depends on it
def test_kernels_of_gradients_belong_to_the_operations_that_compute_them() -> None:
    forward = {kernel.function for kernel in OPERATION.cuda_kernels(["sm_80", "sm_90"])}
    assert forward == {"attention_small", "attention_hopper", "attention_portable"}
    both = GRADIENTS.cuda_kernels(["sm_80"])
    case = AttentionBackwardCase("c", "bf16", 1, 1, 1, 64, 64, 72)
    needed = GRADIENTS.needed(both, [case])
    assert (
        {kernel.function for kernel in needed}
        == {kernel.function for kernel in both}
        > {
            "attention_portable",
            "attention_backward_statistics",
        }
    )
    assert {kernel.macros.get("HEAD_DIM", 96) for kernel in needed} == {80, 96, 128}
    assert GRADIENTS.needed(both, [replace(case, head_dim=512)]) == []


def test_without_cases_all_is_built_what_belongs_to_no_operation_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(kernel: CudaKernel, cache: object) -> None:
        raise BuildError("not now", log="")

    monkeypatch.setattr(nvrtc, "compile_kernel", refused)
    report = build("cuda", ("sm_80",), Progress())
    labels = [failure.kernel for failure in report.failures]
    assert sorted(labels) == sorted(kernel.label for kernel in kernels(["sm_80"]))
    assert any(label.startswith("rotate") for label in labels)


def test_nothing_is_built_for_a_race_without_our_kernels() -> None:
    choices = Choices(suite="small", implementations=("pytorch_math",))
    plan = make_plan(choices, "cpu", registry)
    assert build_for(plan, Progress()).kernels == ()


def test_a_kernel_that_does_not_compile_is_a_failure_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashmoe_science.jit import host

    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo toy 1 && exit 0\necho "error: no"; exit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("FLASHMOE_CACHE_DIR", str(tmp_path / "cache"))
    host.find_compiler.cache_clear()
    try:
        report = build("cpu", (), Progress())
    finally:
        host.find_compiler.cache_clear()
    assert not report.passed
    assert report.failures[0].log == "error: no\n"


@pytest.mark.parametrize("name", ["sm_9", "sm90", "90", "compute_80", "sm_80;x"])
def test_what_is_no_architecture(name: str) -> None:
    with pytest.raises(UsageError, match="expected a CUDA architecture such as"):
        build("cuda", (name,), Progress())


def test_architectures_are_for_cuda() -> None:
    with pytest.raises(UsageError, match="give --device cuda"):
        build("cpu", ("sm_80",), Progress())


def test_an_architecture_that_is_unknown() -> None:
    """A command line is wrong; another machine's GPU is not ready."""
    with pytest.raises(UsageError, match=r"--arch .sm_35.: unknown GPU architecture"):
        check_architectures(("sm_80", "sm_35"), ("cudadent42",))
    check_architectures(("sm_35",), ("mine.toml",))
    with pytest.raises(MachineNotReadyError, match="sm_35"):
        build("cuda", ("sm_35",), Progress())


def test_device_of_the_command_line() -> None:
    assert choose_device("auto", offline=True) == "cuda"
    assert choose_device("cuda:1", offline=False) == "cuda:1"
    with pytest.raises(UsageError):
        choose_device("gpu", offline=False)


@pytest.mark.slow
def test_cuda_kernels_compile_for_a_gpu_that_is_not_here() -> None:
    if nvrtc_version() is None:
        pytest.skip(f"compiling CUDA needs cuda-bindings and NVRTC: {install_command('cu13')}")
    progress = Progress()
    report = build("cuda", ("sm_80",), progress)
    assert report.passed, report.failures
    assert progress.told[-1] == (len(report.kernels), len(report.kernels))
    for kernel in report.kernels:
        assert kernel.resources is not None
        assert 0 < kernel.resources.registers_per_thread <= 255
        assert kernel.resources.spill_store_bytes == 0
