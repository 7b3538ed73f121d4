"""Code for a processor's matrix unit (AMX): by loops in place of its instructions, or by these where there are any.

Where the processor has no instructions for bf16 either (AVX512-BF16), AVX-512 computes what they would.
"""

from __future__ import annotations

import pytest

from flashmoe_science.jit import host
from flashmoe_science.jit.host import InstructionSet

UNITS = EMULATED, PROCESSORS = "emulated", "the processor's"


def code_of_pairs() -> tuple[InstructionSet, dict[str, int]]:
    """What a kernel is compiled for, and with which macros, to take dot products of bf16 pairs; skips where this CPU
    cannot even by AVX-512 alone."""
    able = host.available_instruction_sets()
    if InstructionSet.AVX512_BF16 in able:
        return InstructionSet.AVX512_BF16, {}
    if InstructionSet.AVX512 not in able:
        pytest.skip("this CPU lacks avx512")
    return InstructionSet.AVX512, {"EMULATE_BF16": 1}


def code_of(unit: str) -> tuple[InstructionSet, dict[str, int]]:
    """The same for the matrix unit."""
    if unit == EMULATED:
        instruction_set, macros = code_of_pairs()
        return instruction_set, {**macros, "EMULATE_AMX": 1}
    if InstructionSet.AMX not in host.available_instruction_sets():
        pytest.skip("this CPU lacks amx")
    return InstructionSet.AMX, {}
