"""What the far side writes reaches a terminal as text alone."""

from __future__ import annotations

import io
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from cudadent42.base.shown import plain
from cudadent42.remote.core.terminal import showing


def test_orders_to_the_terminal_are_left_out() -> None:
    assert plain("a\x1b]52;c;YmFk\x07b\x9b2J\tc\n") == "a]52;c;YmFkb2J\tc\n"
    assert plain("nvcc\u202elc.") == "nvcclc."


def test_a_line_is_not_written_over() -> None:
    assert plain("deleted everything\rstopped nothing\r\n") == "deleted everything\nstopped nothing\n"


@given(st.text(), st.integers(1, 4))
def test_pieces_are_shown_as_the_whole(text: str, size: int) -> None:
    data = text.replace("\r", "").encode()
    to = io.StringIO(newline="")
    show = showing(to)
    for start in range(0, len(data), size):
        show(data[start : start + size])
    shown = to.getvalue()
    assert shown == plain(text.replace("\r", ""))
    assert all(letter in "\n\t" or unicodedata.category(letter) not in ("Cc", "Cf") for letter in shown)
