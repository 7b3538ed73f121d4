"""Where a path leads, links in a loop included."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from cudadent42.base.paths import real_path
from module_graph import nodes_of

SOURCES = Path(__file__).parents[3] / "src" / "cudadent42"


def test_links_and_folders_are_followed_as_path_resolve_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    monkeypatch.chdir(tmp_path)
    for text in ("link/file", "folder/../link", "absent/x", ".", "link/.."):
        assert real_path(Path(text)) == Path(text).resolve()


def test_a_loop_of_links_is_a_path_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    path = real_path(tmp_path / "one")
    assert path.is_absolute()
    with pytest.raises(OSError, match="symbolic links"):
        path.read_text()


def test_no_module_asks_pathlib_where_a_user_s_path_leads() -> None:
    """``Path(__file__).resolve()`` is the package's own path; of others it may be a loop, which pathlib raises for."""
    calls = [
        f"{path.relative_to(SOURCES)}:{node.lineno}"
        for path in SOURCES.rglob("*.py")
        if path.name != "paths.py"
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "resolve"
        and not node.args
        and ast.unparse(node.func.value) != "Path(__file__)"
    ]
    assert not calls, f"real_path of cudadent42.base.paths takes loops of links: {calls}"
