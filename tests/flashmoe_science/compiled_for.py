"""The architectures that tests compile CUDA kernels for: one of them in the quick tests, all with ``--slow``.

Each is the same source once more, a second of a processor or two for a kernel. That every kernel compiles for every
architecture is what `.ci/run` shows, which also runs the slow tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest


def each_architecture(names: Sequence[str], quick: str = "sm_90") -> pytest.MarkDecorator:
    """The parameter ``architecture``; ``quick``, one of the names, is that of the quick tests."""
    assert quick in names
    marks = {name: [] if name == quick else [pytest.mark.slow] for name in names}
    return pytest.mark.parametrize("architecture", [pytest.param(name, marks=marks[name]) for name in names])
