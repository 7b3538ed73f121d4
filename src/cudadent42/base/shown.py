"""What is shown to a user: no orders to the terminal, and no more than is read.

Names, messages of candidates and words from other machines may hold any character. On its way to a terminal all text
goes through `plain`; messages go through `message`.
"""

from __future__ import annotations

import unicodedata
from typing import Any, TextIO

MOST_LETTERS = 2000
"""Of one message."""

_NOT_SHOWN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Unicode's control characters (a terminal takes them for orders), format characters (they turn lines around), halves
of letters, private ones and its own line ends."""
_ALONE = 200
"""Letters from the end that a message that was cut keeps: what to do stands there."""


def plain(text: str) -> str:
    """``text`` without what would move a cursor, change colours, fill the clipboard or turn a line around."""
    if text.isascii() and text.isprintable():
        return text
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(
        letter for letter in lines if letter in "\n\t" or unicodedata.category(letter) not in _NOT_SHOWN
    )


def message(text: str, most: int = MOST_LETTERS) -> str:
    """``text`` as a message: plain, and cut in its middle where it is longer than ``most`` letters."""
    text = plain(text)
    if len(text) <= most:
        return text
    end = min(_ALONE, most // 4)
    left_out = f" [... {len(text) - most} more letters ...] "
    return text[: most - end - len(left_out)] + left_out + text[-end:]


class PlainStream:
    """A text stream that shows what is written to it as `plain` has it; else the stream that it is made of."""

    def __init__(self, stream: TextIO) -> None:
        self.unfiltered = stream

    def write(self, text: str) -> int:
        self.unfiltered.write(plain(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


def unfiltered(stream: Any) -> Any:
    """For who writes control characters of its own, and cleans what it shows."""
    return stream.unfiltered if isinstance(stream, PlainStream) else stream
