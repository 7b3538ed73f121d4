from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudadent42.base.errors import NewerVersionError, UsageError
from cudadent42.native import specification
from cudadent42.native.problem import blocks
from cudadent42.native.specification import Dimension, Factor, Specification, Target
from cudadent42.operations.attention.case import AttentionCase

HEAD = """
schema_version = 1
abi = 1
name = "mine"
source = "mine.cu"
entry = "mine"
"""
LAUNCH = """
[[configuration]]
macros = { BLOCK_M = 64 }
threads = 128
grid.x = [{ dimension = "seqlen_q", per = "BLOCK_M" }, "num_heads"]
grid.y = ["batch"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.cu").touch()
    (tmp_path / "mine.cpp").touch()
    return tmp_path


def parse(folder: Path, text: str) -> Specification:
    return specification.parse(text, folder / "mine.toml")


def case(**changes: object) -> AttentionCase:
    values: dict[str, object] = {
        "name": "c",
        "dtype": "bf16",
        "batch": 2,
        "num_heads": 8,
        "num_kv_heads": 8,
        "seqlen_q": 130,
        "seqlen_k": 200,
        "head_dim": 64,
    }
    return AttentionCase(**(values | changes))  # type: ignore[arg-type]


def test_what_is_left_out_has_a_meaning(folder: Path) -> None:
    kernel = parse(folder, HEAD + LAUNCH)
    assert kernel.device == "cuda"
    assert kernel.dtypes == ("fp16", "bf16")
    assert kernel.why_not(case(head_dim=128, causal=True, num_kv_heads=2), "sm_75") is None
    (configuration,) = kernel.configurations
    assert (configuration.threads, configuration.dynamic_shared_bytes(128)) == (128, 0)
    assert blocks(configuration.grid, case(), 132) == (3 * 8, 2, 1)


def test_a_cpp_file_needs_no_configuration(folder: Path) -> None:
    kernel = parse(folder, HEAD.replace(".cu", ".cpp"))
    assert (kernel.device, kernel.dtypes) == ("cpu", ("fp32",))
    assert kernel.why_not(case(dtype="fp32"), None) is None


def test_the_first_configuration_that_suits_is_taken(folder: Path) -> None:
    text = HEAD + LAUNCH.replace("threads", 'head_dims = [64]\narchitectures = ["sm_90a"]\nthreads')
    text += LAUNCH.replace("128", "256") + "shared_bytes = 1024\nshared_bytes_per_head_dim = 384\n"
    kernel = parse(folder, text)
    first, second = kernel.configurations
    assert kernel.find("bf16", 64, "sm_90") is first
    assert first.compiled_for("sm_90") == "sm_90a"
    for other in (
        kernel.find("bf16", 128, "sm_90"),
        kernel.find("bf16", 64, "sm_100"),
        kernel.find("bf16", 64, "sm_80"),
    ):
        assert other is second
    assert second.compiled_for("sm_80") == "sm_80"
    assert second.dynamic_shared_bytes(128) == 1024 + 384 * 128


@pytest.mark.parametrize(
    ("line", "changes", "architecture", "reason"),
    [
        ("", {"dtype": "fp32"}, "sm_80", "takes fp16, bf16, not fp32"),
        ("head_dims = [128]", {}, "sm_80", "head_dim 128, not 64"),
        ("causal = false", {"causal": True}, "sm_80", "no causal mask"),
        ("grouped_heads = false", {"num_kv_heads": 2}, "sm_80", "no grouped heads"),
        ("seqlen_q_multiple = 64", {}, "sm_80", "seqlen_q that is a multiple of 64, not 130"),
        ("seqlen_k_multiple = 64", {}, "sm_80", "seqlen_k that is a multiple of 64, not 200"),
    ],
)
def test_cases_that_are_not_done_have_a_reason(
    folder: Path, line: str, changes: dict[str, object], architecture: str, reason: str
) -> None:
    kernel = parse(folder, HEAD + line + LAUNCH)
    assert reason in str(kernel.why_not(case(**changes), architecture))


def test_an_architecture_without_a_configuration(folder: Path) -> None:
    kernel = parse(folder, HEAD + LAUNCH.replace("threads", 'architectures = ["sm_90a"]\nthreads'))
    assert "no configuration for bf16 and head_dim 64 on sm_80" in str(kernel.why_not(case(), "sm_80"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[", "not valid TOML"),
        (HEAD.replace("abi = 1", "abi = 2"), "abi = 2, of a newer cudadent42"),
        (HEAD.replace("schema_version = 1", ""), "'schema_version' is missing"),
        (HEAD.replace("entry", "entri"), r"unknown key 'entri'.*did you mean 'entry'"),
        (HEAD.replace('entry = "mine"', 'entry = "mine(); evil"'), "the name of a C function"),
        (HEAD.replace("mine.cu", "other.cu"), "no file"),
        (HEAD.replace("mine.cu", "mine.py"), "expected a .cu or .cpp file"),
        (HEAD + 'operation = "moe"', "for attention so far"),
        (HEAD + 'dtypes = ["fp8"]', "unknown dtype 'fp8'"),
        (HEAD + "head_dims = [4]", "head_dims"),
        (HEAD, "'threads' is missing"),
        (HEAD + LAUNCH.replace("threads = 128", "threads = 2048"), "threads = 2048"),
        (HEAD + LAUNCH.replace('"num_heads"', '"heads"'), "unknown dimension 'heads'"),
        (
            HEAD + LAUNCH.replace('per = "BLOCK_M"', 'per = "BLOCK_N"'),
            r"'BLOCK_N' is no macro.*did you mean 'BLOCK_M'",
        ),
        (HEAD + LAUNCH.replace('per = "BLOCK_M"', "per = 0"), "per = 0"),
        (HEAD + LAUNCH.replace('per = "BLOCK_M"', 'per = "seqlen_q * 2"'), "is no macro"),
        (HEAD + LAUNCH.replace("grid.y", "grid.w"), "unknown key 'w'"),
        (HEAD + LAUNCH.replace("BLOCK_M = 64", "CUDADENT42_X = 1"), "does not begin with CUDADENT42_"),
        (HEAD + LAUNCH.replace("BLOCK_M = 64", 'BLOCK_M = "64 -DEVIL"'), "expected a whole number"),
        (HEAD + LAUNCH.replace("threads", 'architectures = ["sm_91"]\nthreads'), r"'sm_91'.*did you mean"),
        (HEAD.replace(".cu", ".cpp") + LAUNCH, "is of GPU kernels"),
        (HEAD + "configuration = [3]", "expected a table"),
    ],
)
def test_bad_files_say_where_and_what(folder: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse(folder, text)
    assert "mine.toml" in str(caught.value)


def test_a_newer_file_is_told_apart(folder: Path) -> None:
    with pytest.raises(NewerVersionError):
        parse(folder, HEAD.replace("schema_version = 1", "schema_version = 2"))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the kernel"):
        specification.load(tmp_path / "none.toml")


@given(st.integers(1, 10_000), st.integers(1, 512), st.integers(1, 200))
def test_a_grid_covers_every_row_once(seqlen: int, per: int, multiprocessors: int) -> None:
    grid = ((Factor(Dimension.SEQLEN_Q, per),), (Factor(Dimension.MULTIPROCESSORS),), ())
    x, y, z = blocks(grid, case(seqlen_q=seqlen), multiprocessors)
    assert (x - 1) * per < seqlen <= x * per
    assert (y, z) == (multiprocessors, 1)


@pytest.mark.parametrize(
    ("target", "architecture", "admitted"),
    [
        (Target(80, ""), "sm_75", False),
        (Target(80, ""), "sm_80", True),
        (Target(80, ""), "sm_120", True),
        (Target(90, "a"), "sm_90", True),
        (Target(90, "a"), "sm_100", False),
    ],
)
def test_targets(target: Target, architecture: str, admitted: bool) -> None:
    assert target.admits(architecture) is admitted
