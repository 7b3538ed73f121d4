"""The tests of layers see an import however it is written, and say which row forbids it."""

from __future__ import annotations

from pathlib import Path

import pytest

from module_graph import arrows, circular, forbidden, upward_rows

LAYERS = {"low": "", "high": "low"}


def graph_of(folder: Path, low: str, package: str = "") -> dict[str, set[str]]:
    files = {}
    for name, source in (("lab", package), ("lab.low", low), ("lab.high", "")):
        files[name] = folder / f"{name}.py"
        files[name].write_text(source)
    return arrows(files)


@pytest.mark.parametrize(
    "source",
    [
        "import lab.high",
        "from lab import high",
        "from lab.high import name",
        "def lazily():\n    from lab.high import name",
        "if TYPE_CHECKING:\n    from lab.high import Name",
        "import_module('lab.high')",
        "def lazily():\n    return importlib.import_module('lab.high').name",
    ],
)
def test_an_upward_import_is_seen_however_it_is_written(source: str, tmp_path: Path) -> None:
    graph = graph_of(tmp_path, source)
    assert forbidden(graph, LAYERS) == {("low", "high"): ["lab.low imports lab.high"]}


@pytest.mark.parametrize(
    "source",
    [
        "import lab_high",
        "from other import high",
        "import_module('other')",
        "load('lab.high')",
        "x = 'lab.high'",
    ],
)
def test_what_is_no_import_of_the_package_is_none(source: str, tmp_path: Path) -> None:
    assert graph_of(tmp_path, source)["lab.low"] == set()


def test_a_module_may_be_named_after_its_package(tmp_path: Path) -> None:
    package = 'def lazily():\n    return importlib.import_module(f"{__name__}.high")'
    graph = graph_of(tmp_path, "", package)
    assert graph["lab"] == {"lab.high"}
    assert list(forbidden(graph, LAYERS)) == [("lab", "high")]


def test_a_row_that_names_a_later_one_and_a_circle_are_seen() -> None:
    assert upward_rows({"low": "high", "high": "low"}) == [("low", "high")]
    assert circular({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c"]
