"""How much of its code a kernel runs: blocks of keys that a mask hides are left out, not computed and then hidden.

Results would not tell, as what is hidden has no weight either way.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cpu_attention import inputs

from flashmoe_science.cpu import attention
from flashmoe_science.cpu.library import SOURCES
from flashmoe_science.jit import host
from flashmoe_science.jit.host import InstructionSet

STEPS = Path(__file__).with_name("counted_steps.cpp")
COUNTED = "-fsanitize-coverage=trace-pc"
LONG = 512
UNIT = ("-DEMULATE_BF16=1", "-DEMULATE_AMX=1")
TARGETS = {
    "portable": (InstructionSet.PORTABLE, (), torch.float32),
    "avx512": (InstructionSet.AVX512, (), torch.float32),
    "matrix unit": (InstructionSet.AVX512, UNIT, torch.bfloat16),
}
"""What is compiled, and of which type the tensors are."""
Steps = Callable[[bool], int]


@pytest.fixture(scope="module", params=TARGETS)
def steps(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """How many basic blocks of the kernel one call on one thread runs, with a causal mask or none."""
    instruction_set, macros, dtype = TARGETS[request.param]
    if instruction_set not in host.available_instruction_sets():
        pytest.skip(f"this CPU lacks {instruction_set.value}")
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("counted")
    counter, path = folder / "steps.o", folder / "counted.so"
    subprocess.run([compiler, "-c", "-fPIC", str(STEPS), "-o", str(counter)], check=True)
    flags = (*host.COMMON_FLAGS, "-O0", *instruction_set.flags, "-O0", *macros, COUNTED)
    sources = (str(SOURCES / "attention_forward.cpp"), str(counter))
    subprocess.run([compiler, *flags, *sources, "-o", str(path)], check=True)
    library = ctypes.CDLL(str(path))
    launch = library.flashmoe_attention_forward
    launch.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int]
    counted = ctypes.c_int64.in_dll(library, "steps")

    query, key, value = inputs(1, 1, 1, LONG, LONG, 32, dtype)
    out = torch.empty_like(query)

    def count(causal: bool) -> int:
        plan = attention._plan(query, key, value, causal, None, launch)
        before = counted.value
        tensors = (each.data_ptr() for each in (query, key, value, out))
        assert launch(plan.address, *tensors, None, 1) == 0
        return int(counted.value - before)

    return count


def test_hidden_blocks_are_not_computed(steps: Steps) -> None:
    """Half of all products is hidden; a little more than half is computed, as blocks on the diagonal are."""
    assert 0.5 < steps(True) / steps(False) < 0.6
