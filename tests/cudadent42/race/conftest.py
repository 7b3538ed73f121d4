from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources are exported into a cache of the test's own."""
    monkeypatch.setenv("FLASHMOE_CACHE_DIR", str(tmp_path / "cache"))
