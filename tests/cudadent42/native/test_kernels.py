"""Kernel files compiled and run for real: on this CPU, and for GPUs that are not here."""

from __future__ import annotations

import ctypes
import math
import re
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cudadent42.base.errors import UsageError
from cudadent42.model.implementations import UnsupportedCaseError, is_plug_in
from cudadent42.model.records import BuildFailure
from cudadent42.native import build, specification
from cudadent42.native.build import build_file
from cudadent42.native.kernels import INCLUDE_DIRECTORY
from cudadent42.native.problem import Problem
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.operations.attention.inputs import random_inputs
from cudadent42.operations.attention.reference import attention_float64
from cudadent42.registry import get
from cudadent42.scaffold import Kind, create
from flashmoe_science.jit import host
from flashmoe_science.jit.records import KernelBuild

CASE = AttentionCase("c", "fp32", 2, 4, 2, 20, 33, 40, causal=True)

REPORTING = """
#include "cudadent42/attention.h"
CUDADENT42_EXPORT int reporting(const Cudadent42Attention *p) {
    if (p->head_dim == 8) return CUDADENT42_UNSUPPORTED;
    if (p->head_dim == 16) return 7;
    float *out = (float *)p->output;
    const long long numbers[] = {p->batch, p->num_heads, p->num_kv_heads, p->seqlen_q, p->seqlen_k, p->head_dim,
        p->query_stride[0], p->query_stride[1], p->query_stride[2], p->key_stride[0], p->value_stride[1],
        p->output_stride[2], p->causal, p->element, p->threads, p->reserved, ANSWER};
    for (int i = 0; i < (int)(sizeof numbers / sizeof *numbers); i++) out[i] = (float)numbers[i];
    out[17] = (float)p->softmax_scale;
    out[18] = ((const float *)p->query)[3];
    return CUDADENT42_DONE;
}
"""


def kernel_file(
    folder: Path, source: str, suffix: str = ".cpp", entry: str = "reporting", more: str = ""
) -> str:
    (folder / f"kernel{suffix}").write_text(source)
    path = folder / "kernel.toml"
    path.write_text(
        f'schema_version = 1\nabi = 1\nname = "k"\nsource = "kernel{suffix}"\nentry = "{entry}"\n{more}\n'
    )
    return str(path)


def test_the_struct_has_the_size_and_order_of_the_header() -> None:
    text = (INCLUDE_DIRECTORY / "cudadent42" / "attention.h").read_text()
    body = re.search(r"typedef struct Cudadent42Attention \{(.*?)\} Cudadent42Attention;", text, re.DOTALL)
    assert body
    fields = re.findall(r"(\w+)(?:\[3\])?;", re.sub(r"/\*.*?\*/", "", body[1]))
    assert fields == [name for name, _ in Problem._fields_]
    assert ctypes.sizeof(Problem) == 200
    assert f"CUDADENT42_ABI_VERSION {specification.ABI_VERSION}\n" in text


def test_a_kernel_is_told_the_whole_problem(tmp_path: Path) -> None:
    name = kernel_file(tmp_path, REPORTING, more="[[configuration]]\nmacros = { ANSWER = 42 }")
    assert is_plug_in(name)
    inputs = random_inputs(CASE, 0, 0, "cpu")
    implementation = get(name, "attention")
    assert implementation.devices == ("cpu",)
    told = implementation.prepare(CASE, inputs)().flatten()[:19].tolist()
    q, k, v = inputs.tensors
    assert told[:6] == [2, 4, 2, 20, 33, 40]
    assert told[6:12] == [*q.stride()[:3], k.stride(0), v.stride(1), 40]
    assert told[12:17] == [1, 0, torch.get_num_threads(), 0, 42]
    assert told[17] == pytest.approx(40**-0.5)
    assert told[18] == pytest.approx(float(q.flatten()[3]))


def test_what_a_kernel_returns(tmp_path: Path) -> None:
    name = kernel_file(tmp_path, REPORTING, more="[[configuration]]\nmacros = { ANSWER = 42 }")
    prepare = get(name, "attention").prepare
    for head_dim, error in ((8, UnsupportedCaseError), (16, RuntimeError)):
        case = AttentionCase("c", "fp32", 1, 1, 1, 4, 4, head_dim)
        call = prepare(case, random_inputs(case, 0, 0, "cpu"))
        with pytest.raises(error):
            call()
    other = AttentionCase("c", "bf16", 1, 1, 1, 4, 4, 64)
    inputs = random_inputs(other, 0, 0, "cpu")
    with pytest.raises(UnsupportedCaseError, match="takes fp32, not bf16"):
        prepare(other, inputs)


def test_an_entry_that_is_not_exported(tmp_path: Path) -> None:
    name = kernel_file(tmp_path, "int nothing;\n")
    case = AttentionCase("c", "fp32", 1, 1, 1, 4, 4, 64)
    with pytest.raises(UsageError, match="exports no function 'reporting'"):
        get(name, "attention").prepare(case, random_inputs(case, 0, 0, "cpu"))


def test_two_kernels_of_one_name_stay_apart(tmp_path: Path) -> None:
    answers = []
    for answer in (42, 43):
        folder = tmp_path / str(answer)
        folder.mkdir()
        name = kernel_file(folder, REPORTING.replace("ANSWER", str(answer)))
        call = get(name, "attention").prepare(CASE, random_inputs(CASE, 0, 0, "cpu"))
        answers.append(float(call().flatten()[16]))
    assert answers == [42, 43]


# ---------------------------------------------------------------- building


def test_a_build_tells_the_recipe(tmp_path: Path) -> None:
    name = kernel_file(tmp_path, REPORTING, more="[[configuration]]\nmacros = { ANSWER = 42 }")
    (built,) = build_file(name, "cpu", (), ())
    assert isinstance(built, KernelBuild)
    assert built.recipe.configuration == {"CUDADENT42_ELEMENT": 0, "ANSWER": 42}
    assert {"kernel.cpp", "cudadent42/attention.h"} <= set(built.recipe.sources)
    assert str(tmp_path) not in " ".join(built.recipe.flags)


@pytest.mark.parametrize(
    ("more", "head_dim", "builds"), [("", 32, 1), ("head_dims = [32]", 32, 1), ("head_dims = [64]", 32, 0)]
)
def test_what_the_cases_need_is_built_ahead(tmp_path: Path, more: str, head_dim: int, builds: int) -> None:
    """Also a head dim that is none of the usual ones."""
    name = kernel_file(tmp_path, REPORTING.replace("ANSWER", "42"), more=more)
    case = AttentionCase("c", "fp32", 1, 1, 1, 4, 4, head_dim)
    assert len(build_file(name, "cpu", (), (case,))) == builds


def test_what_does_not_compile_is_a_failure_with_the_compilers_words(tmp_path: Path) -> None:
    name = kernel_file(tmp_path, "this is no C++\n")
    (failure,) = build_file(name, "cpu", (), ())
    assert isinstance(failure, BuildFailure)
    assert "error" in failure.log


def test_a_compiler_that_dies_takes_nobody_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = kernel_file(tmp_path, REPORTING)
    fault = tmp_path / "path" / "sitecustomize.py"
    fault.parent.mkdir()
    fault.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.setenv("PYTHONPATH", str(fault.parent))
    (failure,) = build_file(name, "cpu", (), ())
    assert isinstance(failure, BuildFailure)
    assert "SIGSEGV" in failure.message


def test_the_other_kind_of_device(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="compiled for cpu, not for cuda"):
        build_file(kernel_file(tmp_path, REPORTING), "cuda", ("sm_80",), ())


@pytest.mark.usefixtures("nvrtc")
def test_the_cuda_starting_point_compiles_without_a_gpu(tmp_path: Path) -> None:
    create("start", Kind.CUDA, tmp_path)
    built = build_file(str(tmp_path / "start" / "start.toml"), "cuda", ("sm_80", "sm_90a"), ())
    assert [item for item in built if isinstance(item, BuildFailure)] == []
    kernels = [item for item in built if isinstance(item, KernelBuild)]
    assert {item.recipe.architecture for item in kernels} == {"sm_80", "sm_90"}
    assert len(kernels) == 2 * 2 * 2
    for item in kernels:
        assert item.resources is not None
        assert item.resources.spill_store_bytes == 0
        assert item.resources.blocks_per_sm >= 8


@pytest.mark.usefixtures("nvrtc")
def test_cases_narrow_what_is_compiled(tmp_path: Path) -> None:
    create("start", Kind.CUDA, tmp_path)
    case = AttentionCase("c", "bf16", 1, 1, 1, 8, 8, 96)
    built = build_file(str(tmp_path / "start" / "start.toml"), "cuda", ("sm_90",), (case,))
    assert [
        item.recipe.configuration["CUDADENT42_HEAD_DIM"] for item in built if isinstance(item, KernelBuild)
    ] == [96]


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("shared_bytes = 200000", "200,000 bytes of shared memory per block, and sm_86 has"),
        ("shared_bytes_per_head_dim = 2048", "131,072 bytes of shared memory"),
    ],
)
def test_what_does_not_fit_the_target_is_said_before_it_runs(
    tmp_path: Path, change: str, message: str
) -> None:
    create("start", Kind.CUDA, tmp_path)
    path = tmp_path / "start" / "start.toml"
    path.write_text(path.read_text().replace("shared_bytes = 0", change))
    case = AttentionCase("c", "bf16", 1, 1, 1, 8, 8, 64)
    (failure,) = build_file(str(path), "cuda", ("sm_86",), (case,))
    assert isinstance(failure, BuildFailure)
    assert message in failure.message


@pytest.mark.usefixtures("nvrtc")
def test_toolkit_headers_are_there_when_asked_for(tmp_path: Path) -> None:
    from cudadent42.native.kernels import toolkit_include_directories

    if not any((directory / "cuda_fp16.h").exists() for directory in toolkit_include_directories()):
        pytest.skip("no cuda_fp16.h here")
    source = (
        '#include <cuda_fp16.h>\n#include "cudadent42/attention.h"\n'
        "CUDADENT42_KERNEL mine(const __grid_constant__ Cudadent42Attention p) {\n"
        "    ((__half *)p.output)[threadIdx.x] = __float2half(1.0f);\n}\n"
    )
    more = 'dtypes = ["fp16"]\ntoolkit_headers = true\n[[configuration]]\nthreads = 32\ngrid.x = ["batch"]'
    built = build_file(kernel_file(tmp_path, source, ".cu", "mine", more), "cuda", ("sm_80",), ())
    assert all(isinstance(item, KernelBuild) for item in built), built


# ---------------------------------------------------------------- element conversions

CONVERSIONS = """
#include "cudadent42/element.h"
CUDADENT42_EXPORT float load(unsigned short bits) { cudadent42_element e = bits; return cudadent42_load(&e); }
CUDADENT42_EXPORT unsigned short store(float value) { cudadent42_element e; cudadent42_store(&e, value); return e; }
"""
TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(scope="module")
def conversions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    libraries = {}
    for dtype in TORCH:
        folder = tmp_path_factory.mktemp(dtype)
        (built,) = build_file(kernel_file(folder, CONVERSIONS, more=f'dtypes = ["{dtype}"]'), "cpu", (), ())
        assert isinstance(built, KernelBuild), built
        library = libraries[dtype] = host.load(built)
        library.load.argtypes, library.load.restype = [ctypes.c_ushort], ctypes.c_float
        library.store.argtypes, library.store.restype = [ctypes.c_float], ctypes.c_ushort
    return libraries


@pytest.mark.parametrize("dtype", TORCH)
def test_every_element_is_read_as_torch_reads_it(conversions: dict[str, ctypes.CDLL], dtype: str) -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    expected = bits.view(TORCH[dtype]).float()
    actual = torch.tensor([conversions[dtype].load(number) for number in range(1 << 16)])
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual[~expected.isnan()], expected[~expected.isnan()])


@given(
    value=st.one_of(
        st.floats(width=32), st.floats(-70000, 70000, width=32), st.floats(-(2.0**-20), 2.0**-20, width=32)
    )
)
@pytest.mark.parametrize("dtype", TORCH)
def test_floats_are_rounded_as_torch_rounds_them(
    conversions: dict[str, ctypes.CDLL], dtype: str, value: float
) -> None:
    actual = (
        torch.tensor([conversions[dtype].store(value)], dtype=torch.int32).to(torch.uint16).view(TORCH[dtype])
    )
    expected = torch.tensor([value]).to(TORCH[dtype])
    assert math.isnan(float(actual)) if math.isnan(value) else torch.equal(actual, expected), struct.pack(
        "f", value
    )


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_cuda_starting_point_is_right(tmp_path: Path, dtype: str, causal: bool) -> None:
    create("start", Kind.CUDA, tmp_path)
    case = AttentionCase("c", dtype, 2, 4, 2, 100, 77, 72, causal)
    inputs = random_inputs(case, 0, 0, "cuda:0")
    result = get(str(tmp_path / "start" / "start.toml"), "attention").prepare(case, inputs)()
    expected = attention_float64(inputs, causal)
    torch.testing.assert_close(result.double(), expected, rtol=2e-2, atol=2e-2)


def test_the_module_answers_on_its_own(tmp_path: Path) -> None:
    """What the other process does, in this one."""
    path = kernel_file(tmp_path, REPORTING, more="[[configuration]]\nmacros = { ANSWER = 1 }")
    answer = build.answer(build.Request(path, (), ("fp32",), (64,)))
    assert answer.report.passed
    assert len(answer.report.kernels) == 1
