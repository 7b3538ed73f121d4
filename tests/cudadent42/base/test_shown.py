"""No text is an order to the terminal, and no message is longer than is read."""

from __future__ import annotations

import io
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudadent42.base.shown import MOST_LETTERS, PlainStream, message, plain, unfiltered

HOSTILE = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b31m\u202egnp.exe\u2066\u200b\x00\x08\x7f"


def test_what_a_terminal_would_obey_is_left_out() -> None:
    assert plain(f"a{HOSTILE}b\r\nc\rd\te") == "a]52;c;ZXZpbA==[2J31mgnp.exeb\nc\nd\te"


@given(st.text())
def test_nothing_else_is_changed(text: str) -> None:
    shown = plain(text)
    assert all(
        letter in "\n\t"
        or unicodedata.category(letter)[0] not in "C"
        or letter.isprintable()
        or unicodedata.category(letter) == "Cn"
        for letter in shown
    )
    assert plain(shown) == shown


@pytest.mark.parametrize("length", [0, 1, MOST_LETTERS, MOST_LETTERS + 1, 100_000])
def test_a_message_has_an_end_and_keeps_it(length: int) -> None:
    shown = message("x" * length + "; do this")
    assert len(shown) <= MOST_LETTERS
    assert shown.endswith("; do this")
    assert (shown == "x" * length + "; do this") == (length + 9 <= MOST_LETTERS)


def test_a_stream_that_is_plain() -> None:
    under = io.StringIO()
    stream = PlainStream(under)
    print(f"a{HOSTILE}", file=stream)  # type: ignore[arg-type]
    stream.writelines([HOSTILE])
    assert "\x1b" not in under.getvalue()
    assert unfiltered(stream) is under
    assert unfiltered(under) is under
    assert not stream.isatty()
