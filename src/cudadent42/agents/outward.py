"""What leaves for an agent: text that candidates may have written is bounded, plain and marked as theirs."""

from __future__ import annotations

from typing import Any

from cudadent42.base.shown import message
from cudadent42.model.text import clean

MARK = "with words of the candidate"

_MOST_LETTERS = 600
"""Of one quotation."""


def quoted(text: str, most: int = _MOST_LETTERS) -> str:
    """``text`` on one line, as said by the candidate or of it; empty where it is. Nothing in it ends the quotation."""
    if not text:
        return ""
    return f'{MARK}: "{clean(message(_whole(text), most)).replace(chr(34), chr(39))}"'


def plain_answer(answer: Any) -> Any:
    """JSON of which no string is too long, or has control characters or halves of letters."""
    if isinstance(answer, str):
        return message(_whole(answer))
    if isinstance(answer, dict):
        return {plain_answer(key): plain_answer(value) for key, value in answer.items()}
    if isinstance(answer, list | tuple):
        return [plain_answer(each) for each in answer]
    return answer


def _whole(text: str) -> str:
    """Halves of letters joined where two belong together, else replaced: they cannot be sent."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
