"""The two-pass Hopper kernels of attention backward without a GPU: what they take, which blocks work on what, and what
they are passed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import re
import subprocess
from pathlib import Path

import pytest
import torch
from emulated import NEEDS_COMPILER
from hypothesis import given
from hypothesis import strategies as st

from flashmoe_science.configs.attention import backward_two_pass as configs
from flashmoe_science.cuda.attention.gradients import explain, hopper, two_pass
from flashmoe_science.cuda.attention.gradients.problem import BackwardProblem, GradientKind
from flashmoe_science.cuda.tensor_map import MAP_BYTES
from flashmoe_science.errors import InputError
from flashmoe_science.gradients import Needs
from flashmoe_science.jit.limits import check_block
from flashmoe_science.jit.nvrtc import KERNEL_DIRECTORY
from problems import H200

HEADER = (KERNEL_DIRECTORY / "hopper_two_pass" / "parameters.cuh").read_text()
ROWS = (4 * 128 * 256, 128 * 256, 256)
PROBLEM = BackwardProblem(
    batch=2,
    num_heads=4,
    num_kv_heads=4,
    seqlen_q=128,
    seqlen_k=128,
    head_dim=256,
    dtype=torch.bfloat16,
    causal=True,
    softmax_scale=0.125,
    needs=Needs(True, True, True),
    query_strides=ROWS,
    key_strides=ROWS,
    value_strides=ROWS,
    output_strides=ROWS,
    grad_output_strides=ROWS,
    grad_query_strides=ROWS,
    grad_key_strides=ROWS,
    grad_value_strides=ROWS,
)


@pytest.mark.parametrize(("head_dim", "compiled"), [(136, 192), (192, 192), (200, 256), (256, 256)])
def test_it_takes_what_one_pass_cannot(head_dim: int, compiled: int) -> None:
    problem = dataclasses.replace(PROBLEM, head_dim=head_dim)
    assert hopper.choose(problem, H200) is None
    choice = two_pass.choose(problem, H200)
    assert choice is not None
    assert choice.configuration == configs.TwoPassBackward(compiled, True)
    two_pass.check(problem, choice.configuration)
    query = torch.empty(2, 4, 100, head_dim, dtype=torch.bfloat16, device="meta")
    assert explain(query, query, query, causal=True, device=H200) == choice


@pytest.mark.parametrize("needs", [Needs(True, False, False), Needs(False, True, True)])
def test_a_pass_that_is_not_needed_does_not_keep_it_from_a_call(needs: Needs) -> None:
    assert two_pass.why_not(dataclasses.replace(PROBLEM, needs=needs), H200) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 128}, "takes 129 to 256"),
        ({"softmax_scale": 0.0}, "needs a positive one"),
        ({"seqlen_q": 0}, "no query rows"),
        ({"seqlen_k": 0}, "no keys"),
        ({"needs": Needs(True, False, True)}, "only one is needed"),
        ({"batch": 20000}, "more than 65535 heads"),
        ({"grad_output_strides": (0, 128 * 256, 256)}, "expanded dimension"),
        ({"window_left": 5}, "it takes no window and no cap"),
        ({"softcap": 2.0}, "it takes no window and no cap"),
    ],
)
def test_it_says_why_it_does_not_take_a_call(change: dict[str, object], reason: str) -> None:
    problem = dataclasses.replace(PROBLEM, **change)  # type: ignore[arg-type]
    refusal = two_pass.why_not(problem, H200)
    assert refusal is not None
    assert reason in refusal
    assert two_pass.choose(problem, H200) is None
    with pytest.raises(InputError):
        two_pass.check(problem, configs.TwoPassBackward(256, True))


def test_other_gpus_take_the_portable_kernels() -> None:
    query = torch.empty(2, 4, 100, 256, dtype=torch.bfloat16, device="meta")
    for device in (
        dataclasses.replace(H200, architecture="sm_100"),
        dataclasses.replace(H200, nvrtc=(12, 8)),
    ):
        assert explain(query, query, query, device=device).kernel is GradientKind.PORTABLE


def test_tiles_fit() -> None:
    for tile in configs.all_configurations():
        for shared_bytes in (tile.key_value_shared_bytes, tile.query_shared_bytes):
            check_block(repr(tile), "sm_90", tile.threads, shared_bytes)


def test_arguments_have_the_size_of_the_kernels_struct() -> None:
    """Counted in the source: tensor maps, pointers and 64-bit fields, 32-bit ones, padded to the maps' alignment."""
    text = re.sub(r"//[^\n]*", "", HEADER)
    body = text[text.index("struct Parameters {") :]
    total = 0
    for declaration in body[body.index("{") + 1 : body.index("};")].split(";"):
        if not declaration.strip():
            continue
        size = 8 if "*" in declaration or "int64" in declaration else 4
        if "TensorMap" in declaration:
            size = MAP_BYTES
        array = re.search(r"\[(\d+)\]", declaration)
        total += size * (int(array[1]) if array else 1)
    assert -(-total // 64) * 64 == two_pass._PASS_BYTES
    assert total == two_pass._PASS_AT + two_pass._PASS.size + two_pass._PASS_REST.size


@pytest.fixture(scope="module", params=[0, 1], ids=["full", "causal"])
def job_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels' own assignment of thread blocks, as C++."""
    body = HEADER[HEADER.index("struct Job {") : HEADER.index("__device__ __forceinline__ void load_tile")]
    folder: Path = tmp_path_factory.mktemp("jobs")
    (folder / "jobs.cpp").write_text(
        "#include <algorithm>\nusing std::min;\n#define __device__\n#define __forceinline__ inline\n"
        f"constexpr bool CAUSAL = {request.param};\n{body}\n"
        'extern "C" void write_job(int index, int blocks, int heads, int section, int rows, int* to) {\n'
        "    const Job job = job_of(index, blocks, heads, section, rows);\n"
        "    to[0] = job.block;\n    to[1] = job.head;\n}\n"
    )
    library = folder / "jobs.so"
    subprocess.run(
        ["g++", "-std=c++17", "-shared", "-fPIC", str(folder / "jobs.cpp"), "-o", str(library)], check=True
    )
    return ctypes.CDLL(str(library))


@NEEDS_COMPILER
@given(
    blocks=st.integers(1, 50),
    heads=st.integers(1, 17),
    most=st.integers(1, 20),
    rows=st.sampled_from([64, 128]),
)
def test_every_block_of_every_head_is_worked_on_once(
    job_of: ctypes.CDLL, blocks: int, heads: int, most: int, rows: int
) -> None:
    section = -(-heads // -(-heads // most))
    job = (ctypes.c_int * 2)()
    jobs = []
    for index in range(blocks * heads):
        job_of.write_job(index, blocks, heads, section, rows, job)
        jobs.append(tuple(job))
    assert sorted(jobs) == [(block, head) for block in range(blocks) for head in range(heads)]


@given(rows=st.integers(1, 1 << 20), head_dim=st.sampled_from(configs.HEAD_DIMS), heads=st.integers(1, 65535))
def test_sections_share_the_heads_evenly(rows: int, head_dim: int, heads: int) -> None:
    assert configs.heads_per_section(rows, configs.TwoPassBackward(head_dim, False), heads) == 1
    section = configs.heads_per_section(rows, configs.TwoPassBackward(head_dim, True), heads)
    assert 1 <= section <= heads
    sections = -(-heads // section)
    assert (sections - 1) * section < heads
    assert section - (heads - (sections - 1) * section) < sections
