"""Without transformers, the kernels are there, and what needs it says how to get it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["transformers"] = None  # as if it were not installed
import flashmoe_science
flashmoe_science.sdpa
try:
    flashmoe_science.accelerate
except flashmoe_science.InputError as error:
    print(error)
"""


def test_what_is_missing_is_named() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    assert line.startswith("transformers 5.8.1 or newer cannot be imported")
    assert "pip install" in line
    assert "[transformers]" in line


OLD = """
import sys, types
sys.modules["transformers"] = old = types.ModuleType("transformers")
old.__path__, old.__version__ = [], "5.0.0"
for name in ("integrations", "integrations.moe"):
    sys.modules[f"transformers.{name}"] = part = types.ModuleType(name)
    part.__path__ = []
import flashmoe_science
try:
    flashmoe_science.accelerate
except flashmoe_science.InputError as error:
    print(error)
"""


def test_one_that_is_too_old_is_named() -> None:
    done = subprocess.run([sys.executable, "-c", OLD], capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    assert line.startswith("transformers 5.0.0 is too old; expected 5.8.1 or newer")
