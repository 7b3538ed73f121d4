"""The page that says which files a change opens names files that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "where-changes-go.md").read_text(encoding="utf-8")
PATHS = sorted(set(re.findall(r"`((?:tests|docs|cudadent42|flashmoe_science)/[^`\s]+)`", PAGE)))


def exists(path: str) -> bool:
    return any((root / path).exists() for root in (ROOT, ROOT / "src"))


def test_it_speaks_of_five_changes_before_and_now() -> None:
    changes = PAGE.split("\n## ")[1:]
    assert len(changes) == 5
    assert [change.partition("\n")[0] for change in changes if "before" not in change.lower()] == []
    assert len(PATHS) > 20


@pytest.mark.parametrize("path", PATHS)
def test_a_path_is_there_and_a_new_one_has_neighbours(path: str) -> None:
    """Where it says NAME, that folder has others of the kind."""
    if "NAME" not in path:
        assert exists(path)
        return
    folder, _, last = path.rstrip("/").rpartition("/")
    suffix = Path(last).suffix
    root = next(root for root in (ROOT, ROOT / "src") if (root / folder).is_dir())
    kin = [
        each for each in (root / folder).iterdir() if each.suffix == suffix and each.is_dir() == (not suffix)
    ]
    assert kin
