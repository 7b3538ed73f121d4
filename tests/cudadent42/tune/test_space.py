"""Spaces: the grammar against a reference, what a file may say, and the arms that come of it."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudadent42.base.errors import UsageError
from cudadent42.native import specification
from cudadent42.registry import get
from cudadent42.tune.arms import materialise, variant
from cudadent42.tune.grammar import DEEPEST, LONGEST, Kind, parse
from cudadent42.tune.space import DEFAULT, MOST_ARMS, load, parse_space, range_fields

ROOT = Path(__file__).resolve().parents[3]

KINDS = {"A": Kind.NUMBER, "B": Kind.NUMBER, "WIDE": Kind.TRUTH, "up.way": Kind.WORD}
VALUES = {"A": 6, "B": 4, "WIDE": True, "up.way": "tiles"}

KERNEL = """
schema_version = 1
abi = 1
name = "k"
source = "k.cu"
entry = "k"
head_dims = [64]

[[configuration]]
macros = { BLOCK_M = 64, WARPS = 4, OTHER = 9 }
threads = 128
grid.x = [{ dimension = "seqlen_q", per = "BLOCK_M" }, "num_heads", "batch"]
"""

SPACE = """
schema_version = 1
name = "tiles"
kernel = "k.toml"
where = "BLOCK_M * WARPS <= 512 and BLOCK_M % WARPS == 0"

[space]
BLOCK_M = [32, 64, 128]
WARPS = [2, 4, 8]

[launch]
threads = "32 * WARPS"
shared_bytes_per_head_dim = "2 * BLOCK_M"
"""


def space_file(folder: Path, text: str = SPACE, kernel: str = KERNEL) -> Path:
    (folder / "k.cu").write_text("// nothing")
    (folder / "k.toml").write_text(kernel)
    path = folder / "space.toml"
    path.write_text(text)
    return path


def truth(text: str) -> bool:
    value = parse(text, KINDS, Kind.TRUTH, "here").value(VALUES)
    assert isinstance(value, bool)
    return value


def _numbers() -> st.SearchStrategy[str]:
    """Expressions that Python's own syntax has too, so that Python can say what they are."""
    leaves = st.one_of(st.sampled_from(["A", "B"]), st.integers(0, 10**6).map(str))
    sign = st.sampled_from(["+", "-", "*", "//", "%"])
    shape = st.sampled_from(["{} {} {}", "({} {} {})", "-{} {} {}", "{} {} -{}", "-({} {} {})"])

    def larger(smaller: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.tuples(shape, smaller, sign, smaller).map(lambda parts: parts[0].format(*parts[1:]))

    return st.recursive(leaves, larger, max_leaves=5)


def _conditions() -> st.SearchStrategy[str]:
    sign = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
    numbers = _numbers()
    two = st.tuples(numbers, sign, numbers).map(" ".join)
    three = st.tuples(numbers, sign, numbers, sign, numbers).map(" ".join)
    shape = st.sampled_from(["{} and {}", "{} or {}", "not {} and {}", "({}) or not ({})"])

    def larger(smaller: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.tuples(shape, smaller, smaller).map(lambda parts: parts[0].format(*parts[1:]))

    return st.recursive(st.one_of(two, three), larger, max_leaves=4)


@given(_conditions().filter(lambda text: len(text) <= LONGEST), st.integers(-50, 50), st.integers(-50, 50))
def test_an_expression_is_what_python_makes_of_it(text: str, a: int, b: int) -> None:
    settings = {"A": a, "B": b}
    try:
        expected: Any = eval(text, {"__builtins__": {}}, settings)  # of this test's own making
    except ZeroDivisionError:
        with pytest.raises(UsageError, match="divides by zero"):
            parse(text, KINDS, Kind.TRUTH, "here").value(settings)
        return
    assert parse(text, KINDS, Kind.TRUTH, "here").value(settings) is expected


@given(st.text(alphabet=string.printable, max_size=60))
def test_no_text_does_anything_but_give_a_condition_or_an_error(text: str) -> None:
    said = ""
    try:
        assert parse(text, KINDS, Kind.TRUTH, "here").value(VALUES) in (True, False)
    except UsageError as error:
        said = str(error)
    assert not said or said.startswith("here: ") or "divides by zero" in said


def test_truth_values_words_and_short_circuits() -> None:
    assert truth("WIDE and up.way == 'tiles'")
    assert truth("up.way != 'rows' and WIDE == yes")
    assert not truth("not WIDE or no")
    assert truth("B == 4 or A // 0 == 1")
    assert not truth("B == 5 and A // 0 == 1")
    assert truth("1 < B <= 4 < A")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("A", "gives a whole number, not a condition"),
        ("A < WIDE", "compares"),
        ("'a' < up.way", "orders a word"),
        ("WIDE + 1 == 2", "takes a whole number"),
        ("A and WIDE", "takes a condition"),
        ("A / 2 == 3", "division is //"),
        ("A ** 2 == 3", "where a value was expected"),
        ("AA == 3", "names 'AA'"),
        ("__import__('os')", "names '__import__'"),
        ("A == 1.5", "cannot be read"),
        ("A == 3)", "does not end"),
        ("(A == 3", "ends too early"),
        ("", "ends too early"),
        ("(" * (DEEPEST + 1) + "A == 3" + ")" * (DEEPEST + 1), "nested"),
        ("not " * 60 + "WIDE", "nested"),
        ("A == 1 " + "or A == 1 " * 100, "characters"),
    ],
)
def test_a_mistake_is_named(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match="here: ") as raised:
        parse(text, KINDS, Kind.TRUTH, "here")
    assert problem in str(raised.value)


def test_arms_are_the_combinations_that_meet_the_conditions(tmp_path: Path) -> None:
    space = load(space_file(tmp_path))
    arms = space.arms()
    assert arms[0].name == DEFAULT
    assert [dict(arm.settings) for arm in arms[1:]] == [
        {"BLOCK_M": m, "WARPS": w} for m in (32, 64, 128) for w in (2, 4, 8) if m * w <= 512
    ]
    assert arms[1].name == "BLOCK_M=32, WARPS=2"


def test_an_arm_is_a_kernel_file_like_any_other(tmp_path: Path) -> None:
    space = load(space_file(tmp_path))
    arms = space.arms()
    paths = materialise(space, arms, tmp_path / "tuning")
    assert paths[DEFAULT] == str(tmp_path / "k.toml")
    arm = next(arm for arm in arms if arm.name == "BLOCK_M=128, WARPS=2")
    kernel = specification.load(Path(paths[arm.name]))
    configuration = kernel.find("fp16", 64, "sm_90")
    assert configuration is not None
    assert dict(configuration.macros) == {"BLOCK_M": 128, "WARPS": 2, "OTHER": 9}
    assert configuration.threads == 64
    assert configuration.dynamic_shared_bytes(64) == 2 * 128 * 64
    assert configuration.grid[0][0].per == 128
    assert kernel.source == (tmp_path / "k.cu").resolve()
    assert kernel.description == arm.name
    assert materialise(space, arms, tmp_path / "tuning") == paths


@given(st.text(max_size=30), st.text(max_size=30))
def test_what_a_kernels_file_says_survives_being_written_again(description: str, folder_name: str) -> None:
    from cudadent42.base.toml import parse_toml
    from cudadent42.native.writing import _key, _value

    document = {"description": description, folder_name: [1, True, {"a": -3, "b c": 'x"\\\x7f\n'}], "f": 0.5}
    text = "\n".join(f"{_key(name)} = {_value(value)}" for name, value in document.items())
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    assert parse_toml(text, "here") == document


def test_a_librarys_arm_is_a_variant(tmp_path: Path) -> None:
    text = """
schema_version = 1
name = "portable"
kernel = "cudadent42[portable]"
where = ["block_n <= 64", "overlap == no or block_n == 48"]
[space]
block_n = [32, 48, 96]
overlap = [true, false]
"""
    space = parse_space(text, tmp_path / "s.toml")
    arms = space.arms()
    assert list(materialise(space, arms, tmp_path).values()) == [
        "cudadent42",
        "cudadent42[portable,block_n=32,overlap=no]",
        "cudadent42[portable,block_n=48,overlap=yes]",
        "cudadent42[portable,block_n=48,overlap=no]",
    ]
    assert not (tmp_path / "arms").exists()


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('kernel = "k.toml"', 'kernel = "other.toml"', "no file"),
        ('kernel = "k.toml"', 'kernel = "pytorch"', "one of the library's kernels"),
        ('kernel = "k.toml"', 'kernel = "cudadent42[portable,block_n=3]"', "one of the library's kernels"),
        ("BLOCK_M = [32, 64, 128]", "BLOCK_M = []", "expected a list"),
        ("BLOCK_M = [32, 64, 128]", "BLOCK_M = [32, true]", "expected a list"),
        ("BLOCK_M = [32, 64, 128]", "BLOCK_M = [32, 32]", "twice"),
        ("BLOCK_M = [32, 64, 128]", 'BLOCK_M = ["a"]', "whole number"),
        ("BLOCK_M = [32, 64, 128]", "CUDADENT42_X = [32]\nBLOCK_M = [1]", "the lab's"),
        ("BLOCK_M * WARPS <= 512", "BLOCK_M * WARPS <= 1", "no configuration meets `where`"),
        ("BLOCK_M * WARPS <= 512", "BLOCKM * WARPS <= 1", "did you mean 'BLOCK_M'"),
        ("BLOCK_M * WARPS <= 512", "BLOCK_M // (WARPS - 4) > 1", "divides by zero at BLOCK_M=32, WARPS=4"),
        ("BLOCK_M = [32, 64, 128]", "BLOCK_M = [32]\nyes = [1]", "'yes' cannot name a parameter"),
        ('threads = "32 * WARPS"', 'thread = "32 * WARPS"', "unknown key"),
        ('threads = "32 * WARPS"', "threads = 32", "in quotes"),
        ("schema_version = 1", "schema_version = 2", "newer"),
        ("schema_version = 1", "schema_version = 1\nregions = ['seqlen']", "regions has 'seqlen'"),
        (
            "WARPS = [2, 4, 8]",
            "WARPS = [1, 2]\nX = [" + ", ".join(map(str, range(60))) + "]\nY = [1, 2, 3, 4, 5]",
            f"more than {MOST_ARMS} configurations",
        ),
    ],
)
def test_a_space_that_makes_no_sense_says_why(tmp_path: Path, old: str, new: str, problem: str) -> None:
    assert old in SPACE
    with pytest.raises(UsageError) as raised:
        load(space_file(tmp_path, SPACE.replace(old, new))).arms()
    assert problem in str(raised.value)
    assert "space.toml" in str(raised.value)


@pytest.mark.parametrize("given", ["5", "false", "{}", "[1]"])
def test_a_condition_is_text(tmp_path: Path, given: str) -> None:
    """What is no text is not taken for no condition."""
    where = next(line for line in SPACE.splitlines() if line.startswith("where"))
    with pytest.raises(UsageError, match=r"expected an expression in quotes, or a list of them"):
        load(space_file(tmp_path, SPACE.replace(where, f"where = {given}")))


def test_an_expression_of_the_launch_must_give_a_sensible_number(tmp_path: Path) -> None:
    space = load(space_file(tmp_path, SPACE.replace('"32 * WARPS"', '"32 - 100 * WARPS"')))
    with pytest.raises(UsageError, match="threads gives"):
        materialise(space, space.arms(), tmp_path / "tuning")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks/spaces").glob("*.toml")), ids=lambda path: path.stem
)
def test_the_spaces_that_come_with_the_repository_are_of_variants_that_there_are(path: Path) -> None:
    space = load(path)
    operation = "moe" if path.stem.startswith("moe") else "attention"
    assert set(space.regions) <= set(range_fields(operation))
    for arm in space.arms()[1:]:
        get(variant(space, arm), operation)
