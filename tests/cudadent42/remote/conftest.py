from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# For sshd.py: in importlib's import mode a test's folder is not on the path.
sys.path.insert(0, str(Path(__file__).parent))

from sshd import Server, make_keys, serve


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture
def server(keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serve(keys, tmp_path, monkeypatch) as running:
        yield running
