from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudadent42.model import text


@pytest.mark.parametrize(
    ("milliseconds", "expected"),
    [
        (52.51, "52.5 ms"),
        (0.00852, "8.52 µs"),
        (0.9999, "1.00 ms"),
        (0.99949, "999 µs"),
        (1234.0, "1.23 s"),
        (0.0000021, "2.10 ns"),
        (math.nan, "n/a"),
    ],
)
def test_latency(milliseconds: float, expected: str) -> None:
    assert text.latency(milliseconds) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (4.314, "4.31×"),
        (1.0031, "1.003×"),
        (0.82, "0.820×"),
        (12.44, "12.4×"),
        (250.2, "250×"),
        (math.inf, "n/a"),
    ],
)
def test_ratio(value: float, expected: str) -> None:
    assert text.ratio(value) == expected


def test_interval_has_the_same_decimals_at_both_ends() -> None:
    assert text.interval(0.998, 1.24) == "0.998 to 1.240"
    assert text.interval(0.0611, 46.09) == "0.061 to 46.1"
    assert text.interval(math.nan, 1.0) == "n/a"


@given(st.text())
def test_clean_leaves_one_line_without_controls_and_changes_nothing_else(words: str) -> None:
    cleaned = text.clean(words)
    assert len(cleaned) == len(words)
    assert len(cleaned.splitlines()) <= 1
    cleaned.encode("utf-8")
    assert all(new == old or new == "\ufffd" for new, old in zip(cleaned, words, strict=True))


@given(st.text(), st.integers(3, 40))
def test_shorten_keeps_both_ends(words: str, length: int) -> None:
    short = text.shorten(words, length)
    assert len(short) <= length
    if len(words) <= length:
        assert short == words
    else:
        head, tail = short.split("…")[0], short.rpartition("…")[2]
        assert words.startswith(head)
        assert words.endswith(tail)


@given(st.floats(min_value=1e-9, max_value=1e9))
def test_figures_is_within_half_a_unit_of_the_third(value: float) -> None:
    shown = float(text.figures(value).replace(",", ""))
    assert shown == pytest.approx(value, rel=5.1e-3)


def test_plug_in_is_named_by_its_file() -> None:
    assert text.implementation("/home/me/code/kernel.py:attention") == "kernel.py:attention"
    assert text.implementation("a/b") == "a/b"
