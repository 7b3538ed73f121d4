"""Runs a program that uses the processor's matrix unit without the package, which would ask for it.

Usage: python with_matrix_unit.py PROGRAM [ARGUMENT...]
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from flashmoe_science.jit import host

if __name__ == "__main__":
    assert host.amx_is_granted()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
