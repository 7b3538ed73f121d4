"""What leaves before anything runs: compiled for this CPU, and by NVRTC for GPUs that are not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from cudadent42.base.errors import MachineNotReadyError, UnwritableError
from cudadent42.operations import definition, numerics
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.operations.moe.case import MoeCase
from cudadent42.tune.arms import materialise
from cudadent42.tune.prune import CompiledArm, Target, compile_arm, compile_to_verify, representatives
from cudadent42.tune.space import DEFAULT, Space, parse_space
from flashmoe_science.errors import NoRoomError
from flashmoe_science.jit import host

SMALL = AttentionCase("small", "fp32", 1, 2, 2, 16, 16, 8)
H100 = Target("cuda", "sm_90", "H100")

CPP = """
#include "cudadent42/attention.h"
CUDADENT42_EXPORT int pruned(const Cudadent42Attention *p) {
#if BLOCK == 7
#error seven rows are not a tile
#endif
    float *out = (float *)p->output;
    for (long long i = 0; i < p->seqlen_q; i++) out[i] = (float)((BLOCK > 16 ? 16 : BLOCK) * i);
    return CUDADENT42_DONE;
}
"""

CUDA = """
#include "cudadent42/attention.h"
CUDADENT42_KERNEL pruned(const __grid_constant__ Cudadent42Attention p) {
    extern __shared__ float tile[];
    float *out = (float *)p.output;
#if LIVE > 200
    float many[LIVE];
    for (int i = 0; i < LIVE; i++) many[i] = out[i * threadIdx.x];
    __syncthreads();
    for (int round = 0; round < 8; round++)
        for (int i = 0; i < LIVE; i++) many[i] = many[i] * many[(i * 7 + round) % LIVE] + tile[i];
    float sum = 0;
    for (int i = 0; i < LIVE; i++) sum += many[(i * (int)p.batch) % LIVE];
    out[threadIdx.x] = sum;
#else
    out[threadIdx.x] = tile[threadIdx.x];
#endif
}
"""


def tuned(folder: Path, space: str, kernel: str, source: str, suffix: str) -> tuple[Space, list[str]]:
    (folder / f"k{suffix}").write_text(source)
    (folder / "k.toml").write_text(
        f'schema_version = 1\nabi = 1\nname = "k"\nsource = "k{suffix}"\nentry = "pruned"\n{kernel}'
    )
    read = parse_space(f'schema_version = 1\nname = "s"\nkernel = "k.toml"\n{space}', folder / "s.toml")
    return read, [arm.name for arm in read.arms()]


def compile_all(
    space: Space, folder: Path, target: Target, case: AttentionCase | MoeCase
) -> list[CompiledArm]:
    arms = space.arms()
    names = materialise(space, arms, folder)
    return [compile_arm(space, arm, names[arm.name], [case], target) for arm in arms]


def test_what_does_not_compile_and_what_is_the_same_code_is_not_raced(tmp_path: Path) -> None:
    space, names = tuned(
        tmp_path,
        "[space]\nBLOCK = [7, 8, 16, 32]",
        "[[configuration]]\nmacros = { BLOCK = 16 }",
        CPP,
        ".cpp",
    )
    compiled = compile_all(space, tmp_path / "t", Target("cpu"), SMALL)
    raced, out = representatives(compiled, SMALL.id)
    assert names == [DEFAULT, "BLOCK=7", "BLOCK=8", "BLOCK=16", "BLOCK=32"]
    assert raced == (DEFAULT, "BLOCK=8")
    assert "seven rows" in out["BLOCK=7"]
    assert out["BLOCK=16"] == out["BLOCK=32"] == "the same machine code as default"


@pytest.mark.usefixtures("fresh_processes")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_of_the_compile_cache_is_no_fault_of_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on record as refused is never compiled again."""
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec {host.find_compiler().command[0]} "$@" -o /dev/full\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("FLASHMOE_CACHE_DIR", str(tmp_path / "cache"))
    space, _ = tuned(tmp_path, "[space]\nBLOCK = [8]", "", CPP, ".cpp")
    with pytest.raises(MachineNotReadyError, match="the disk is full"):
        compile_all(space, tmp_path / "t", Target("cpu"), SMALL)


def test_a_full_disk_is_no_fault_of_the_librarys_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise NoRoomError("cannot write to the compile cache")

    monkeypatch.setattr("flashmoe_science.jit.nvrtc.compile_kernel", full)
    text = 'schema_version = 1\nname = "s"\nkernel = "cudadent42[portable]"\n[space]\nblock_n = [32]'
    space = parse_space(text, tmp_path / "s.toml")
    with pytest.raises(UnwritableError, match="compile cache"):
        compile_all(space, tmp_path, H100, AttentionCase("c", "bf16", 1, 8, 8, 1024, 1024, 128))


def test_a_case_that_the_kernel_does_not_take_is_refused_for_every_arm(tmp_path: Path) -> None:
    space, _ = tuned(tmp_path, "[space]\nBLOCK = [8]", "head_dims = [64]", CPP, ".cpp")
    compiled = compile_all(space, tmp_path / "t", Target("cpu"), SMALL)
    assert all("takes head_dim 64" in item.refused[SMALL.id] for item in compiled)
    assert representatives(compiled, SMALL.id)[0] == ()


@pytest.mark.usefixtures("nvrtc")
def test_spills_limits_and_launches_are_told_without_a_gpu(tmp_path: Path) -> None:
    case = AttentionCase("c", "fp16", 1, 2, 2, 16, 16, 64)
    configuration = (
        "[[configuration]]\nmacros = { LIVE = 1, WARPS = 4, ROWS = 8 }\nthreads = 128\ngrid.x = ['batch']"
    )
    space, names = tuned(
        tmp_path,
        "[space]\nLIVE = [1, 300]\nWARPS = [4, 8]\nROWS = [8, 4096]\n"
        '[launch]\nthreads = "32 * WARPS"\nshared_bytes_per_head_dim = "ROWS"',
        configuration,
        CUDA,
        ".cu",
    )
    compiled = compile_all(space, tmp_path / "t", H100, case)
    raced, out = representatives(compiled, case.id)
    # The default has no dynamic shared memory; the arms differ in threads and shared memory, not in code.
    assert raced == (DEFAULT, "LIVE=1, WARPS=4, ROWS=8", "LIVE=1, WARPS=8, ROWS=8")
    assert out["LIVE=1, WARPS=4, ROWS=4096"].startswith(
        "it does not fit: it needs 262,144 bytes of shared memory"
    )
    assert "spills" in out["LIVE=300, WARPS=4, ROWS=8"] or "stack" in out["LIVE=300, WARPS=4, ROWS=8"]
    assert set(names) == {*raced, *out}
    assert "registers" in compiled[0].resources[case.id]


@pytest.mark.usefixtures("nvrtc")
def test_the_librarys_arms_are_compiled_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    text = (
        'schema_version = 1\nname = "s"\nkernel = "cudadent42[portable]"\n'
        "[space]\nblock_n = [32, 64, 4096]\nquery_steps = [8, 100]"
    )
    space = parse_space(text, tmp_path / "s.toml")
    case = AttentionCase("c", "bf16", 1, 8, 8, 1024, 1024, 128)
    arms = space.arms()[:5]
    names = materialise(space, arms, tmp_path)
    compiled = [compile_arm(space, arm, names[arm.name], [case], H100) for arm in arms]
    raced, out = representatives(compiled, case.id)
    assert raced[0] == DEFAULT
    assert set(raced) | set(out) == {arm.name for arm in arms}
    assert len({item.code.get(case.id) for item in compiled}) > 1
    big = [compile_arm(space, space.arms()[5], "cudadent42[portable,block_n=4096]", [case], H100)]
    assert "shared memory" in big[0].refused[case.id]


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("kernel", ["portable", "hopper", "few"])
def test_the_ways_of_a_mixture_of_experts_are_compiled_too(tmp_path: Path, kernel: str) -> None:
    text = f'schema_version = 1\nname = "s"\nkernel = "cudadent42[{kernel}]"\n[space]\nx = [1]'
    space = parse_space(text, tmp_path / "s.toml")
    tokens = 1 if kernel == "few" else 4096
    case = MoeCase("c", "bf16", tokens, 1024, 512, 8, 2)
    default, own = space.arms()
    same = compile_arm(space, own, f"cudadent42[{kernel}]", [case], H100)
    assert list(same.code) == [case.id], same.refused
    assert compile_arm(space, default, "cudadent42", [case], H100).code


@pytest.mark.usefixtures("nvrtc")
def test_a_kernel_of_many_cases_is_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashmoe_science.jit import nvrtc

    looked: list[str] = []
    original = nvrtc.compile_kernel

    def counted(kernel: nvrtc.CudaKernel, **given: bool) -> object:
        looked.append(kernel.label)
        return original(kernel, **given)

    text = 'schema_version = 1\nname = "s"\nkernel = "cudadent42[portable]"\n[space]\nblock_n = [32]'
    arm = parse_space(text, tmp_path / "s.toml").arms()[1]
    space = parse_space(text, tmp_path / "s.toml")
    cases = [AttentionCase(f"c{n}", "bf16", 1, 8, 8, 1024 * n, 1024 * n, 128) for n in (1, 2, 3)]
    name = "cudadent42[portable,block_n=32]"
    alone = [compile_arm(space, arm, name, [case], H100).code for case in cases]
    monkeypatch.setattr(nvrtc, "compile_kernel", counted)
    monkeypatch.setattr("cudadent42.tune.prune.compile_to_verify", lambda *given: 0)
    compiled = compile_arm(space, arm, name, cases, H100)
    assert len(looked) == len(set(looked)) < len(cases)
    assert compiled.code == {id: code for each in alone for id, code in each.items()}


@pytest.mark.usefixtures("nvrtc")
def test_what_verifying_takes_is_compiled_with_the_arm() -> None:
    """Sizes and activations of adversarial inputs that no case has; a layer without tokens has nothing to compile."""
    from flashmoe_science.cuda.device import GPUS
    from flashmoe_science.jit.nvrtc import compile_kernel

    case = MoeCase("c", "bf16", tokens=512, hidden=2048, intermediate=768, experts=128, top_k=8)
    name, device = "cudadent42[hopper,tokens=64,stages=3]", GPUS["H100"]
    count = compile_to_verify(name, [case], H100)
    kernels = {
        kernel.label: kernel
        for hard in numerics(case).hard_inputs("bf16")
        for kernel in definition("moe").configured(name, hard.case, device).kernels
    }
    own = {kernel.label for kernel in definition("moe").configured(name, case, device).kernels}
    assert count == len(kernels)
    assert len(kernels.keys() - own) > 3
    assert all(compile_kernel(kernel, allow_defects=True).cached for kernel in kernels.values())
