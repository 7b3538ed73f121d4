"""What a session is about is what it measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from cudadent42.flows import pipeline
from cudadent42.plan import RunOptions, make_plan
from cudadent42.registry import registry
from cudadent42.session.events import Settings
from cudadent42.session.workshop import Lab


@pytest.mark.parametrize(
    ("entry", "beside", "measured"),
    [
        ("mine.py:attention", (), ("pytorch", "mine.py:attention")),
        ("mine.py:attention", ("cudadent42",), ("pytorch", "mine.py:attention", "cudadent42")),
        ("", ("cudadent42",), ("pytorch", "cudadent42")),
        ("", (), ("pytorch", "cudadent42")),
    ],
)
def test_the_implementation_that_is_changed_is_measured_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    entry: str,
    beside: tuple[str, ...],
    measured: tuple[str, ...],
) -> None:
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    asked: list[RunOptions] = []
    monkeypatch.setattr(pipeline, "run", lambda request, observer, opened: asked.append(request))
    settings = Settings(suite="small", race_suite="race", entry=entry, implementations=beside)
    Lab((), lambda folder: None).measure(settings, tmp_path / "run", None)  # type: ignore[arg-type]
    assert make_plan(asked[0].choices, "cpu", registry).implementations == measured
