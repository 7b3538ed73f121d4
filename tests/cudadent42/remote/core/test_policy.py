"""Policies and ways, as users write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudadent42.base.errors import UsageError
from cudadent42.remote.core.policy import STOP, After, Ending, Reach, parse_after, parse_reach


def test_words() -> None:
    assert parse_after("stop") == STOP
    assert parse_after("keep") == After(Ending.KEEP)
    assert parse_after("keep:45") == After(Ending.KEEP_FOR, 45)
    assert parse_reach("iap") is Reach.IAP


@given(st.integers(1, 7 * 24 * 60))
def test_what_is_written_is_read(minutes: int) -> None:
    after = After(Ending.KEEP_FOR, minutes)
    assert parse_after(str(after)) == after


@pytest.mark.parametrize(
    "text",
    [
        "",
        "delete",
        "keep:",
        "keep:0",
        "keep:-1",
        "keep:1.5",
        "keep:٢",
        "keep:10081",
        "keep:" + "9" * 99,
        "keep-for",
    ],
)
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected stop, keep or keep:MINUTES"):
        parse_after(text)


def test_other_ways_are_refused() -> None:
    with pytest.raises(UsageError, match="expected auto, iap, internal"):
        parse_reach("--internal-ip")
