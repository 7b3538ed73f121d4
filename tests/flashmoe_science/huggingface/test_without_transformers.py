"""With a transformers that is too old, what needs it says how to get it. Without any: test_lazy_imports.py."""

from __future__ import annotations

import subprocess
import sys

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
