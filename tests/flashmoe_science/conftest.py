from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# For attention_reference.py: in importlib's import mode a test's folder is not on the path.
sys.path.insert(0, str(Path(__file__).parent))

from instruction_sets import BF16_IS_EMULATED, emulate_bf16


@pytest.fixture(autouse=True, scope="session")
def _bf16() -> Iterator[None]:
    """Where this CPU has AVX-512 without products of bf16, tests of kernels for these run nevertheless."""
    with pytest.MonkeyPatch.context() as patch:
        if BF16_IS_EMULATED:
            emulate_bf16(patch.setattr)
        yield
