from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cudadent42.runs.run_folder import RunFolder
from cudadent42.stages.report.figures import roofline as figure
from cudadent42.stages.report.figures.labels import Box, around, place
from cudadent42.stages.report.svg import Sheet
from cudadent42.stages.report.view import View

BOUNDS = Box(0, 0, 400, 300)
POINTS = st.lists(st.tuples(st.floats(0, 400), st.floats(0, 300), st.text(max_size=20)), max_size=30)


@given(POINTS)
def test_names_overlap_nothing_and_stay_inside(points: list[tuple[float, float, str]]) -> None:
    taken = [around(x, y, 3.5) for x, y, _ in points]
    boxes = [label.box for label in place(points, taken, BOUNDS) if label is not None]
    for number, box in enumerate(boxes):
        assert box.within(BOUNDS)
        assert not any(box.overlaps(other) for other in (*taken, *boxes[:number]))


def test_a_name_alone_stands_beside_its_mark() -> None:
    (label,) = place([(100.0, 100.0, "tiny")], [around(100, 100, 3.5)], BOUNDS)
    assert label is not None
    assert (label.dx, label.dy, label.align) == (8.0, 0.0, "left")


def test_marks_of_the_roofline_are_named(small: RunFolder) -> None:
    for wide in (True, False):
        picture = figure.roofline(View(small), Sheet(), wide=wide)
        for name in ("tiny", "small", "large"):
            assert f">{name}</text>" in picture
