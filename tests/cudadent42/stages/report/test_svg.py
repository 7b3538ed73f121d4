from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudadent42.runs.run_folder import RunFolder
from cudadent42.stages.report import svg
from cudadent42.stages.report.figures import marks
from cudadent42.stages.report.figures.samples import strips
from cudadent42.stages.report.figures.speedup import speedup
from cudadent42.stages.report.svg import Role
from cudadent42.stages.report.view import View


def drawing(sheet: svg.Sheet | None) -> str:
    fig = svg.figure(200, 100)
    axes = svg.panel(fig, 10, 10, 180, 80)
    axes.plot([0, 1], [0, 1], color=Role.FASTER.placeholder, marker="o", gid=svg.tip(0))
    axes.text(0, 0, "$a <b>", color=Role.INK.placeholder, parse_math=False)
    return svg.render(fig, prefix="p", title="<t>", description="d & e", sheet=sheet, tips={0: "one <two>"})


def test_colours_become_variables_of_the_page() -> None:
    sheet = svg.Sheet()
    text = drawing(sheet)
    assert "#0a0b" not in text
    assert "stroke:var(--faster)" in sheet.css()
    assert "fill:var(--ink)" in sheet.css()
    assert set(re.findall(r'class="(g\d+)"', text)) <= set(re.findall(r"\.(g\d+){", sheet.css()))


def test_text_stays_text_and_is_escaped() -> None:
    root = ElementTree.fromstring(
        drawing(svg.Sheet()).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    )
    words = ["".join(element.itertext()) for element in root.iter()]
    assert "$a <b>" in words
    assert "one <two>" in words
    assert "d & e" in words


def test_standalone_picture_is_valid_and_carries_both_palettes(run: RunFolder) -> None:
    text = speedup(View(run), None, wide=True)
    root = ElementTree.fromstring(text)
    assert root.get("width") == "1080"
    assert Role.FASTER.light in text
    assert Role.FASTER.dark in text
    assert "var(" not in text
    assert "cudadent42 is faster than pytorch" in text


def test_same_run_same_picture(run: RunFolder) -> None:
    assert speedup(View(run), None, wide=True) == speedup(View(run), None, wide=True)


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2.2."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("role", [Role.INK, Role.MUTED, Role.FASTER, Role.SLOWER, Role.EQUAL, Role.UNDECIDED])
def test_words_can_be_read_on_the_page_and_on_its_bands(role: Role) -> None:
    for ground in (Role.PAGE, Role.BAND):
        assert contrast(role.light, ground.light) >= 4.4
        assert contrast(role.dark, ground.dark) >= 4.4


@given(st.floats(0.01, 100), st.floats(1.001, 1000), st.integers(3, 12))
def test_ticks_are_inside_few_and_rising(low: float, span: float, most: int) -> None:
    high = low * span
    ticks = marks.ratio_ticks(low, high, most)
    assert len(ticks) <= most
    assert list(ticks) == sorted(ticks)
    assert all(low * (1 - 1e-9) <= tick <= high * (1 + 1e-9) for tick in ticks) or ticks == (1.0,)


@given(st.lists(st.floats(0.01, 100), max_size=8), st.floats(0, 0.5))
def test_limits_hold_every_value_and_one(values: list[float], margin: float) -> None:
    low, high = marks.ratio_limits(values, margin)
    assert low < 1 < high
    assert all(low < value < high for value in values)


@pytest.mark.parametrize("blocks", [5, 25, 63, 64, 108, 400])
@pytest.mark.parametrize("names", [("tiny",), ("tiny", "small", "large")])
def test_every_sample_is_a_dot(make, blocks: int, names: tuple[str, ...]) -> None:  # type: ignore[no-untyped-def]
    """matplotlib simplifies paths of 128 points and more, and lines of no length away with them."""
    run = make(repeats=blocks, names=names, dtypes=("bf16",))
    view = View(run)
    drawn = strips(view)
    assert drawn.stride == 1
    for number, row in enumerate(view.rows):
        picture = drawn.panel(row, number, svg.Sheet())
        assert picture.count("h0") == blocks * len(drawn.lanes)


def test_a_long_headline_stays_inside_its_picture(make) -> None:  # type: ignore[no-untyped-def]
    """Both sides of a race are called by their versions."""
    names = ("cudadent42@feature/ping-pong-v2~3-(0123abcd)", "cudadent42@working-tree-with-a-long-name")
    view = View(make(implementations=names, names=("tiny",), dtypes=("bf16",)))
    root = ElementTree.fromstring(speedup(view, None, wide=True))
    lines = [
        t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}text") if t.get("font-size") == "19px"
    ]
    assert " ".join(lines) == view.headline
    assert max(map(len, lines)) <= 80
