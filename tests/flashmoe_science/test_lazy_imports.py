"""What importing the package and naming its functions does not import, and what works without transformers."""

from __future__ import annotations

import bare_torch

WITHOUT_TRANSFORMERS = """
import sys
sys.modules["transformers"] = None  # as if it were not installed
import flashmoe_science
flashmoe_science.sdpa
try:
    flashmoe_science.accelerate
except flashmoe_science.InputError as error:
    print(error)
"""
KERNELS = """
import sys, torch; import flashmoe_science; from flashmoe_science import flash_attention
maps = open("/proc/self/maps").read()
print("attention_forward" in maps, "cuda.core" in sys.modules)
"""
TRANSFORMERS = """
import sys, flashmoe_science; flashmoe_science.sdpa; flashmoe_science.flash_attention
print([name for name in sys.modules if name.startswith("transformers")])
"""


def printed(program: str) -> str:
    done = bare_torch.run(program, compiler=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_transformers_what_is_missing_is_named() -> None:
    (line,) = printed(WITHOUT_TRANSFORMERS).splitlines()
    assert line.startswith("transformers 5.8.1 or newer cannot be imported")
    assert "pip install" in line
    assert "[transformers]" in line


def test_import_does_not_compile_or_load_a_kernel() -> None:
    assert printed(KERNELS) == "False False\n"


def test_nothing_of_transformers_is_imported_before_it_is_asked_for() -> None:
    assert printed(TRANSFORMERS) == "[]\n"
