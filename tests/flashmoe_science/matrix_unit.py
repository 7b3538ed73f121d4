"""Code for a processor's matrix unit (AMX): by loops in place of its instructions, or by these where there are any."""

from __future__ import annotations

import pytest

from flashmoe_science.jit import host
from flashmoe_science.jit.host import InstructionSet

UNITS = EMULATED, PROCESSORS = "emulated", "the processor's"


def code_of(unit: str) -> tuple[InstructionSet, dict[str, int]]:
    """What a kernel is compiled for, and with which macros; skips where this CPU cannot."""
    wanted = InstructionSet.AVX512_BF16 if unit == EMULATED else InstructionSet.AMX
    if wanted not in host.available_instruction_sets():
        pytest.skip(f"this CPU lacks {wanted.value}")
    return wanted, {"EMULATE_AMX": 1} if unit == EMULATED else {}
