"""The instruction sets that tests of the CPU kernels are repeated for. For each of them every kernel is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from flashmoe_science.jit import host
from flashmoe_science.jit.cache import CompileCache
from flashmoe_science.jit.host import InstructionSet
from flashmoe_science.jit.records import KernelBuild

AVAILABLE = host.available_instruction_sets()

_RARE = {InstructionSet.AVX512} if InstructionSet.AVX512_BF16 in AVAILABLE else set()
"""Tested with ``--slow`` alone: AVX-512 without bf16, where the CPU has both. Its vectors are those of AVX-512 with
bf16, and like AVX2 it has no products of bf16."""


BF16_IS_EMULATED = InstructionSet.AVX512 in AVAILABLE and InstructionSet.AVX512_BF16 not in AVAILABLE
"""Whether `emulate_bf16` lets this CPU run what is compiled for one that has products of bf16."""


def emulate_bf16(put: Callable[[object, str, object], None]) -> None:
    """From here on kernels for AVX-512 with bf16 are compiled for AVX-512 alone, which computes the same (bf16.h)."""
    build = host.build

    def emulated(
        source: Path,
        kernel: str,
        instruction_set: InstructionSet,
        cache: CompileCache | None = None,
        *,
        macros: Mapping[str, int] | None = None,
        **others: Any,
    ) -> KernelBuild:
        if instruction_set is InstructionSet.AVX512_BF16:
            instruction_set, macros = InstructionSet.AVX512, {**(macros or {}), "EMULATE_BF16": 1}
        return build(source, kernel, instruction_set, cache, macros=macros, **others)

    put(host, "build", emulated)


def tested() -> tuple[InstructionSet, ...]:
    """Those of this CPU that this run of tests takes."""
    if settings.get_current_profile_name() == "slow":
        return AVAILABLE
    return tuple(each for each in AVAILABLE if each not in _RARE)


def any_instruction_set() -> st.SearchStrategy[InstructionSet]:
    """One of `tested`."""
    return st.deferred(lambda: st.sampled_from(tested()))


def _marks(instruction_set: InstructionSet) -> list[pytest.MarkDecorator]:
    if instruction_set is InstructionSet.AVX512_BF16 and BF16_IS_EMULATED:
        return []
    if instruction_set not in AVAILABLE:
        return [pytest.mark.skip(reason=f"this CPU lacks {instruction_set.value}")]
    return [pytest.mark.slow] if instruction_set in _RARE else []


each_instruction_set = pytest.mark.parametrize(
    "instruction_set",
    [pytest.param(each, marks=_marks(each)) for each in InstructionSet],
    ids=lambda each: each.value,
)
