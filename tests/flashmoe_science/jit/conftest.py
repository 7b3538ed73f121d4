from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

# For own_timers.py: in importlib's import mode a test's folder is not on the path.
sys.path.insert(0, str(Path(__file__).parent))

from own_timers import Timers


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    """Of the notice that something takes long: time passes for it as the test says."""
    timers = Timers()
    monkeypatch.setattr("flashmoe_science.jit.notice.threading", SimpleNamespace(Timer=timers))
    return timers
