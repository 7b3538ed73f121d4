from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudadent42.runs.changes import count

KERNEL = """\
#define WARPS 4
constexpr int TILE_M = 64;
static constexpr int STAGES = 2;

int load(int x) {
    int sum = 0;
    return sum + x;
}

int store(int x) {
    return x;
}
"""
HOST = """\
TILE = 64
NAMES = ["a"]


def launch(x):
    # a comment
    limit: int = 3
    return x + limit


def other(x):
    return x
"""


def diff_of(tmp_path: Path, changes: dict[str, tuple[str, str]]) -> str:
    """What git makes of replacements in the two files above, or in a file that is new."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "k.cu").write_text(KERNEL)
    (tmp_path / "host.py").write_text(HOST)
    git("add", "-A")
    git("-c", "user.name=x", "-c", "user.email=x@localhost", "commit", "-qm", "x")
    for name, (old, new) in changes.items():
        file, _, _ = name.partition("#")
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(path.read_text().replace(old, new) if path.exists() else new)
    git("add", "-A")
    return git("diff", "--unified=0", "HEAD")


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, ()),
        ({"kernels/k.cu": ("WARPS 4", "WARPS 12")}, ("kernels/k.cu: WARPS",)),
        ({"kernels/k.cu": ("TILE_M = 64", "TILE_M = 128")}, ("kernels/k.cu: TILE_M",)),
        (
            {"kernels/k.cu#1": ("WARPS 4", "WARPS 12"), "kernels/k.cu#2": ("STAGES = 2", "STAGES = 3")},
            ("kernels/k.cu: WARPS", "kernels/k.cu: STAGES"),
        ),
        ({"kernels/k.cu": ("return sum + x", "return x + sum")}, ("kernels/k.cu: int load(int x) {",)),
        ({"host.py#1": ("TILE = 64", "TILE = 32")}, ("host.py: TILE",)),
        (
            {"host.py#1": ("return x + limit", "return limit"), "kernels/k.cu": ("WARPS 4", "WARPS 8")},
            ("host.py: def launch(x):", "kernels/k.cu: WARPS"),
        ),
        ({"host.py#1": ("# a comment", "# another comment")}, ()),
        (
            {
                "docs/x.md": ("", "TILE = 3\n"),
                "tests/test_x.py": ("", "TILE = 3\n"),
                "README.md": ("", "x\n"),
            },
            (),
        ),
        ({"new.py": ("", "def f():\n    return 1\n")}, ("new.py: top level",)),
    ],
)
def test_things(tmp_path: Path, changes: dict[str, tuple[str, str]], names: tuple[str, ...]) -> None:
    change = count(diff_of(tmp_path, changes))
    assert sorted((*change.functions, *change.constants)) == sorted(names)
    assert change.things == len(names)


def test_only_a_folder(tmp_path: Path) -> None:
    diff = diff_of(tmp_path, {"host.py": ("TILE = 64", "TILE = 1"), "kernels/k.cu": ("WARPS 4", "WARPS 1")})
    assert count(diff, inside="kernels").constants == ("kernels/k.cu: WARPS",)


def test_described() -> None:
    assert count("").describe() == "0 things"
    lines = "".join(f"--- a/f{i}.py\n+++ b/f{i}.py\n@@ -1 +1 @@\n-X = 1\n+X = 2\n" for i in range(7))
    assert count(lines).describe().startswith("7 things: f0.py: X; ")
    assert count(lines).describe().endswith("; and 2 more")


@given(st.text(alphabet="@-+ ab/1,\n.=", max_size=200))
def test_any_text_is_counted(text: str) -> None:
    assert count(text).things >= 0
    assert count("--- a/x.py\n+++ b/x.py\n@@ -1,9 +1,9 @@ def f():\n" + text).things >= 0
