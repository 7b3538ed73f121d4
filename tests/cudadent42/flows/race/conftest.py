from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashmoe_science.jit.cache import default_cache
from settings_of_git import list_settings_once

# For repositories.py: in importlib's import mode a test's folder is not on the path.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources are exported into a cache of the test's own. Kernels that are compiled already come from the user's."""
    monkeypatch.setenv("FLASHMOE_CACHE_SEED", str(default_cache().directory))
    monkeypatch.setenv("FLASHMOE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(autouse=True, scope="module")
def _settings() -> Iterator[None]:
    """Every second process of git asks for a repository's settings."""
    with pytest.MonkeyPatch.context() as patch:
        list_settings_once(patch.setattr)
        yield
