"""Text of candidates on its way to an agent."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from cudadent42.agents.outward import MARK, plain_answer, quoted

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=3000)


@given(ANY_TEXT)
def test_a_quotation_is_short_plain_and_has_one_end(text: str) -> None:
    line = quoted(text)
    if not text:
        assert line == ""
        return
    assert line.startswith(f'{MARK}: "')
    assert line.count('"') == 2
    assert line.endswith('"')
    assert len(line) < 650
    assert not any(letter < " " or "\ud800" <= letter <= "\udfff" for letter in line)
    line.encode()


@given(st.recursive(ANY_TEXT, lambda part: st.lists(part) | st.dictionaries(ANY_TEXT, part), max_leaves=5))
def test_an_answer_can_be_sent_whatever_it_has(answer: object) -> None:
    sent = json.dumps(plain_answer(answer), ensure_ascii=False)
    sent.encode()
    assert "\x1b" not in sent


def test_a_long_string_in_an_answer_is_cut_and_a_number_stays() -> None:
    answer = plain_answer({"notes": ["x" * 100_000], "ratio": 1.5, "none": None, "passed": True})
    assert len(answer["notes"][0]) <= 2000
    assert (answer["ratio"], answer["none"], answer["passed"]) == (1.5, None, True)
