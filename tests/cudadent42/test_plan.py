from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudadent42.base.errors import UsageError
from cudadent42.model.implementations import Implementation
from cudadent42.model.records import Plan
from cudadent42.plan import Choices, make_plan
from cudadent42.suites.loader import builtin_suites, load_suite, parse_suite

KNOWN = {
    name: Implementation(name, "", ("cpu",), lambda case, inputs: inputs)  # type: ignore[arg-type, return-value]
    for name in ("pytorch", "pytorch-math", "cudadent42")
}
CASE = '[[case]]\nname = "one"\nbatch = 1\nnum_heads = 4\nseqlen = 16\nhead_dim = 64\n'


def plan(**choices: object) -> Plan:
    return make_plan(Choices(**choices), "cpu", lambda operation: KNOWN)  # type: ignore[arg-type]


def test_the_default_suite_is_600_paired_measurements() -> None:
    made = plan()
    assert len(made.cases) == 24
    assert len(made.cases) * len(made.implementations) * made.repeats == 1200
    shapes = [
        (c.batch, c.num_heads, c.seqlen_q, c.head_dim, c.causal) for c in made.cases if c.dtype == "fp16"
    ]
    assert shapes == [
        (1, 1, 32, 64, False),
        (1, 1, 64, 64, False),
        (1, 1, 128, 64, False),
        (1, 1, 256, 64, False),
        (1, 1, 512, 64, False),
        (2, 4, 128, 64, False),
        (1, 8, 512, 64, False),
        (1, 8, 1024, 64, False),
        (1, 8, 2048, 64, False),
        (1, 8, 2048, 64, True),
        (1, 16, 1024, 128, True),
        (4, 8, 512, 64, False),
    ]
    assert [c.name for c in made.cases[:6]] == ["tiny", "small", "medium", "large", "xlarge", "multi-head"]


def test_the_hopper_suite_keeps_tokens_and_width() -> None:
    cases = plan(suite="hopper", implementations=("pytorch", "cudadent42")).cases
    assert len(cases) == 36
    assert {case.dtype for case in cases} == {"bf16"}
    assert {case.tokens for case in cases} == {16384}
    assert {case.num_heads * case.head_dim for case in cases} == {2048}
    assert len({(c.head_dim, c.causal, c.seqlen_q) for c in cases}) == 36


def test_every_builtin_suite_loads_under_its_own_name() -> None:
    assert set(builtin_suites()) >= {"default", "hopper", "small"}
    for name in builtin_suites():
        assert load_suite(name).name == name


def test_choices_override_the_suite() -> None:
    made = plan(dtypes=("fp32",), cases=("tiny", "batch-4"), repeats=3, warmup=0, seed=5)
    assert [case.id for case in made.cases] == ["tiny/fp32", "batch-4/fp32"]
    assert (made.repeats, made.warmup, made.seed) == (3, 0, 5)


def test_a_case_can_be_given_with_its_dtype() -> None:
    assert [case.id for case in plan(cases=("small/bf16",)).cases] == ["small/bf16"]


def test_the_baseline_is_always_measured() -> None:
    assert plan(implementations=("pytorch-math",)).implementations == ("pytorch", "pytorch-math")


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"suite": "defualt"}, r"unknown suite 'defualt'.*did you mean 'default'"),
        ({"suite": "no/such.toml"}, "cannot read the suite no/such.toml: No such file"),
        ({"dtypes": ("fp8",)}, "--dtype: unknown dtype 'fp8'; expected one of fp16, bf16, fp32"),
        ({"cases": ("tinny",)}, "--case: unknown case 'tinny'.*did you mean 'tiny'"),
        (
            {"suite": "moe", "cases": ("qwen3-30b-256",)},
            "unknown case 'qwen3-30b-256'; the suite moe-cpu, which on CPU takes the place of moe, has fine-1",
        ),
        ({"implementations": ("cudadent",)}, "unknown implementation 'cudadent'.*did you mean 'cudadent42'"),
        ({"implementations": ("no/such.py:f",)}, "no file 'no/such.py'"),
        ({"implementations": ("pytorch",)}, "nothing to compare with 'pytorch'"),
        ({"repeats": 0}, "--repeats 0: expected a whole number from 1"),
        ({"warmup": -1}, "--warmup -1"),
        ({"seed": -1}, "--seed -1"),
    ],
)
def test_wrong_choices(choices: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(**choices)


def test_a_suite_by_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'name = "mine"\ndtypes = ["fp32"]\nrepeats = 2\nmargin = 0.05\n{CASE}causal = true\n')
    made = plan(suite=str(path))
    assert (made.suite, made.repeats, made.margin) == ("mine", 2, 0.05)
    assert made.cases[0].causal
    assert (made.cases[0].seqlen_q, made.cases[0].seqlen_k, made.cases[0].num_kv_heads) == (16, 16, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "not valid TOML"),
        ('name = "x"', "'case' is missing"),
        ('name = "x"\ncase = []', r"at least one \[\[case\]\]"),
        (CASE, "'name' is missing"),
        ('name = "a b"\n' + CASE, "name = 'a b'; expected a name"),
        ('name = "x"\nrepeat = 3\n' + CASE, r"unknown key 'repeat'.*did you mean 'repeats'"),
        ('name = "x"\nrepeats = 0\n' + CASE, "repeats = 0; expected a whole number from 1"),
        ('name = "x"\nrepeats = true\n' + CASE, "repeats = True; expected a whole number"),
        ('name = "x"\nmargin = 1.5\n' + CASE, "margin = 1.5"),
        ('name = "x"\ndtypes = ["half"]\n' + CASE, "unknown dtype 'half'"),
        ('name = "x"\ndtypes = []\n' + CASE, "at least one dtype"),
        ('name = "x"\nimplementations = [1]\n' + CASE, "expected a list of names"),
        ('name = "x"\n' + CASE + CASE, "the case 'one' is given twice"),
        ('name = "x"\n' + CASE + "heads = 2\n", r"case 1 \(one\): unknown key 'heads'"),
        ('name = "x"\n' + CASE + "num_kv_heads = 3\n", "not a multiple of num_kv_heads = 3"),
        ('name = "x"\n' + CASE + "seqlen_q = 3\n", "either seqlen or seqlen_q"),
        ('name = "x"\n' + CASE.replace("64", "65"), "multiple of 8"),
        ('name = "x"\n' + CASE.replace("64", "1024"), "from 8 to 512"),
        ('name = "x"\n' + CASE.replace("seqlen = 16\n", "seqlen_q = 3\n"), "'seqlen_k' is missing"),
        ('name = "x"\ncase = [3]', "case 1: expected a table"),
    ],
)
def test_wrong_suites(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_suite(text, "suite.toml")


@given(st.text(max_size=200))
def test_any_text_is_a_usage_error(text: str) -> None:
    # Too little for a suite: the 'case' key at least takes more luck than hypothesis has.
    with pytest.raises(UsageError, match=r"^suite\.toml"):
        parse_suite(text, "suite.toml")


@given(
    st.dictionaries(
        st.sampled_from(["batch", "num_heads", "num_kv_heads", "seqlen", "seqlen_k", "head_dim", "causal"]),
        st.sampled_from(["0", "1", "8", "63", "64", "-1", "true", '"x"', "1.5", "[]", "9" * 20]),
    )
)
def test_any_case_is_sound_or_a_usage_error(values: dict[str, str]) -> None:
    body = "\n".join(f"{key} = {value}" for key, value in values.items())
    try:
        suite = parse_suite(f'name = "x"\n[[case]]\nname = "one"\n{body}\n', "suite.toml")
    except UsageError:
        return
    shape = suite.shapes[0]
    assert shape.num_heads % shape.num_kv_heads == 0
    assert shape.head_dim % 8 == 0
    assert min(shape.batch, shape.seqlen_q, shape.seqlen_k) >= 1
