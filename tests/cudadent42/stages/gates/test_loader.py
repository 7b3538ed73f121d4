from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudadent42.base.errors import UsageError
from cudadent42.decisions.gates import Relation, Scope
from cudadent42.stages.gates import OnFailure, builtin_gates, load
from cudadent42.stages.gates.loader import parse


def gate(body: str) -> str:
    return f'[[gate]]\nname = "g"\n{body}'


def test_the_band_of_within() -> None:
    loaded = parse(gate('metric = "speedup"\nwithin = "10 %"\nof = 0.10'), "f.toml").gates[0]
    assert loaded.relation is Relation.WITHIN
    assert loaded.band == pytest.approx((0.09, 0.11))


@pytest.mark.parametrize(
    ("text", "value"),
    [('"3 %"', 0.03), ("0.03", 0.03), ('"1.5x"', 1.5), ('"1.5×"', 1.5), ("2", 2.0), ('"-1e-3"', -1e-3)],
)
def test_thresholds(text: str, value: float) -> None:
    assert parse(gate(f'metric = "slowdown"\nat_most = {text}'), "f").gates[0].wanted == pytest.approx(value)


def test_scope_and_consequence() -> None:
    loaded = parse(
        gate('metric = "slowdown"\nat_most = 0\ncases = ["a", "b/bf16"]\non_failure = "stop"'), "f"
    ).gates[0]
    assert (loaded.scope, loaded.cases, loaded.on_failure) == (Scope.EVERY, ("a", "b/bf16"), OnFailure.STOP)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gate = 1", "expected a list of gates"),
        ("", "gate"),
        ("gate = []", "at least one"),
        ("schema_version = 99\n" + gate('metric = "a"\nat_most = 1'), "upgrade"),
        (gate('metric = "a"'), "exactly one of"),
        (gate('metric = "a"\nat_most = 1\nat_least = 0'), "exactly one of"),
        (gate('metric = "a"\nat_moist = 1'), "did you mean 'at_most'"),
        (gate('metric = "a"\nat_most = "three"'), "expected a number"),
        (gate('metric = "a"\nat_most = true'), "expected a number"),
        (gate('metric = "a"\nat_most = nan'), "expected a number"),
        (gate('metric = "a"\nat_most = inf'), "expected a number"),
        (gate('metric = "a"\nat_most = "1e999"'), "expected a number"),
        (gate(f'metric = "a"\nat_most = {"9" * 400}'), "expected a number"),
        (gate(f'metric = "a"\nat_most = {"9" * 5000}'), "not valid TOML"),
        ("a = " + "[" * 5000, "not valid TOML"),
        (gate('metric = "a"\nwithin = "-1 %"\nof = 1'), "a share from 0 on"),
        (gate('metric = "a"\nwithin = "1 %"'), "go together"),
        (gate('metric = "a"\nat_most = 1\nof = 1'), "go together"),
        (gate('metric = "a"\nis = 3'), "expected a word"),
        (gate('metric = "a"\nat_most = 1\ncases = 3'), '"overall", "every" or a list'),
        (gate('metric = "a"\nat_most = 1\non_failure = "explode"'), "fail or warn or stop"),
        (gate('metric = "a"\nat_most = 1') + "\n" + gate('metric = "b"\nat_most = 1'), "given twice"),
        ("[[gate", "not valid TOML"),
    ],
)
def test_bad_files_say_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(text, "f.toml")


@given(st.text(max_size=60))
def test_any_text_is_a_gate_file_or_an_error(text: str) -> None:
    with suppress(UsageError):  # anything else is a failure
        assert parse(text, "f").gates


def test_files_that_come_along_are_read() -> None:
    assert set(builtin_gates()) >= {"default", "improvement", "profile"}
    for name in builtin_gates():
        assert load(name).gates
        assert load(name).description


def test_unknown_names_and_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'default'"):
        load("defualt")
    with pytest.raises(UsageError, match="cannot read"):
        load(tmp_path / "no.toml")
    (tmp_path / "latin.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="UTF-8"):
        load(tmp_path / "latin.toml")
