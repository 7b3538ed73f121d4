from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudadent42.patterns.expression import LINE_LIMIT, ExpressionError, compile_bounded
from cudadent42.patterns.lessons import shipped


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+b",
        "(a|a)*b",
        "(?:a*)*",
        ".*a.*b",
        "(a{0,50}){0,50}",
        "((a?){30}){30}",
        "a*b*c*",
        "(?:[ab]|a){40}",
    ],
)
def test_patterns_that_could_run_away_are_refused(pattern: str) -> None:
    with pytest.raises(ExpressionError, match="bound its repeats"):
        compile_bounded(pattern)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("", "empty"),
        ("(", "not a regular expression"),
        ("a{2,1}", "not a regular expression"),
        ("(?=a)b", "only"),
        ("(?P<x>a)", "only"),
        (r"(a)\1", "back references"),
        ("x" * 501, "501 characters"),
    ],
)
def test_what_is_wrong_is_said(pattern: str, words: str) -> None:
    with pytest.raises(ExpressionError, match=words):
        compile_bounded(pattern)


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (r"undefined symbol: _ZN", "OSError: x.so: undefined symbol: _ZN3c10"),
        (r"(?i)OUT of .{0,20}memory", "out of device memory"),
        (r"[]x]\]{2}", "x]]"),
        (r"a{,3}b|c{2}", "cc"),
        (r"a{x}", "a{x}"),
        (r"[^\]]+$", "abc"),
        (r"(?:ab){3}?c*?", "ababab"),
    ],
)
def test_ordinary_patterns_are_admitted(pattern: str, line: str) -> None:
    assert compile_bounded(pattern).search(line)


@given(st.text(alphabet="ab.*+?|()[]{}^$\\,123x-", max_size=14))
def test_any_text_is_compiled_or_refused(pattern: str) -> None:
    """The scanner reads what ``re`` reads: nothing that ``re`` accepts makes it stumble. Of ``(?``, say, ``re`` itself
    says "unexpected end of pattern"; the scanner names a character."""
    assert ": unexpected '" not in refusal(pattern)


def refusal(pattern: str) -> str:
    try:
        return compile_bounded(pattern).pattern[:0]
    except ExpressionError as error:
        return str(error)


def test_no_shipped_pattern_is_slow_on_a_hostile_line() -> None:
    """Orders of magnitude: a pattern that runs away takes longer than the universe has had, not longer than this."""
    patterns = {
        text
        for lesson in shipped()
        for symptom in lesson.symptom
        for clause in symptom.clauses
        for text in (clause.log, clause.matches)
        if text
    }
    lines = [
        "a" * LINE_LIMIT,
        " " * LINE_LIMIT,
        "cannot convert " * (LINE_LIMIT // 15),
        "fail " * (LINE_LIMIT // 5),
    ]
    start = time.process_time()
    for pattern in patterns:
        for line in lines:
            compile_bounded(pattern).search(line)
    assert time.process_time() - start < 60
