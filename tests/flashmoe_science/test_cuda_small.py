"""The small-shape kernel: compiled for every architecture, and run without a GPU.

The second part compiles the kernel's own source as C++ against headers (emulation/) that give its few
primitives (matrix product, shuffles, transposition, messages between blocks) as CPU code with one thread per
CUDA thread.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

EMULATION = Path(__file__).parent / "emulation"
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "cuda_small.py"


@pytest.fixture(scope="module")
def small() -> ModuleType:
    pytest.importorskip("cuda.bindings.nvrtc", reason="compiling CUDA needs cuda-bindings and NVRTC")
    spec = importlib.util.spec_from_file_location("cuda_small", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cuda_small"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a"])
@pytest.mark.parametrize(("config", "head_dim", "seqlen_k"), [("1 4 2", 64, 128), ("1 4 1", 256, 4096)])
def test_compiles_without_spills(
    small: ModuleType, arch: str, config: str, head_dim: int, seqlen_k: int
) -> None:
    dtype = "fp16" if arch == "sm_75" else "bf16"
    problem = small.Problem(1, 4, 2, 128, seqlen_k, head_dim, True, dtype)
    for cluster in ("", " 4") if arch == "sm_90a" else ("",):
        defines = small.macros(
            problem, small.parse(config + cluster)[0], MMA_K=8 if arch == "sm_75" else 16, WIDE_OFFSETS=1
        )
        assert (
            " 0 bytes stack frame, 0 bytes spill stores" in small.compiled(arch, tuple(defines.items())).log
        )


def emulate(small: ModuleType, folder: Path, call: tuple[object, ...], config: str) -> None:
    problem, configuration = small.Problem(*call), small.parse(config)[0]
    defines = small.macros(problem, configuration)
    source = (small.KERNELS / "attention_small.cu").read_text()
    source = re.sub(r"__shared__ (\w+) (\w+)((?:\[[^\]]+\])*);", r"auto& \2 = *shared_alloc<\1\3>();", source)
    start = source.index("__device__ __forceinline__ float reciprocal")
    source = source[:start] + source[source.index("}\n\n", start) + 3 :]
    text = folder / "kernel.cpp"
    text.write_text(source + (EMULATION / "launch.inc").read_text())
    library = folder / "kernel.so"
    macros = [f"-D{name}={value}" for name, value in defines.items()]
    command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", f"-I{EMULATION}"]
    subprocess.run([*command, str(text), "-o", str(library), *macros], check=True)

    dtype = torch.bfloat16 if problem.dtype == "bf16" else torch.float16
    torch.manual_seed(0)
    query_shape = (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim)
    key_shape = (problem.batch, problem.kv_heads, problem.seqlen_k, problem.head_dim)
    # Rows of NaN after the last one show a read past the end.
    tensors = []
    for shape in (query_shape, key_shape, key_shape):
        padded = torch.full((*shape[:2], shape[2] + 2, shape[3] + 8), torch.nan, dtype=dtype)
        padded[:, :, :-2, :-8] = torch.randn(shape)
        tensors.append(padded[:, :, :-2, :-8])
    output, lse = torch.full(query_shape, torch.nan, dtype=dtype), torch.full(query_shape[:3], torch.nan)
    group = problem.heads // problem.kv_heads
    parameters = small.parameters_type(wide=False)()
    for name, tensor in zip(("query", "key", "value", "output"), (*tensors, output), strict=True):
        setattr(parameters, name, tensor.data_ptr())
        for dim, stride in zip(("batch", "head", "row"), tensor.stride(), strict=False):
            setattr(parameters, f"{name}_{dim}", 2 * stride)
    parameters.lse = lse.data_ptr()
    parameters.seqlen_q, parameters.seqlen_k, parameters.group = problem.seqlen_q, problem.seqlen_k, group
    parameters.group_magic = 2**32 // group + 1 if group > 1 else 0
    scale = problem.head_dim**-0.5
    parameters.scale_log2 = scale * 1.4426950408889634
    row_blocks = -(-problem.seqlen_q * group // (8 * configuration.row_tiles))
    grid = (row_blocks * configuration.cluster, problem.kv_heads, problem.batch)
    ctypes.CDLL(str(library)).run(ctypes.byref(parameters), *grid)

    exact, exact_lse = small.reference(*(tensor.double() for tensor in tensors), problem.causal, scale)
    resolution = 2.0**-8 if problem.dtype == "bf16" else 2.0**-11
    assert torch.allclose(output.double(), exact, rtol=2 * resolution, atol=2 * resolution)
    assert torch.allclose(lse.double(), exact_lse, rtol=0, atol=1e-4)


@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")
@pytest.mark.parametrize(
    ("call", "config"),
    [
        ((1, 2, 2, 16, 64, 64, False, "bf16"), "1 4 1"),
        ((1, 1, 1, 20, 200, 64, True, "fp16"), "2 2 2 4"),
        ((1, 1, 1, 20, 7, 64, True, "fp16"), "1 2 1"),
        ((1, 6, 2, 5, 37, 64, True, "bf16"), "2 3 1 2"),
        ((1, 1, 1, 9, 100, 40, True, "bf16"), "1 2 1"),
        ((1, 1, 1, 5, 0, 64, False, "bf16"), "1 2 1"),
        ((1, 1, 1, 9, 150, 64, False, "bf16"), "1 2 1 8"),
    ],
)
def test_emulated(small: ModuleType, tmp_path: Path, call: tuple[object, ...], config: str) -> None:
    emulate(small, tmp_path, call, config)
