from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# For attention_reference.py: in importlib's import mode a test's folder is not on the path.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """PyTorch on one thread, for tests of many small tensors: handing them to a second takes a third of the time."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
