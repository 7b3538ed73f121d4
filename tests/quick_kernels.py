"""CPU kernels of instruction sets that calls on this CPU do not take are compiled with little of the optimiser.

Source and intrinsics are the same, and so are the bits, as no flag lets a compiler change the order of operations. With
``--slow``, and where ``FLASHMOE_CPU_ISA`` names an instruction set, all are compiled as users do.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any


def compile_lesser_ones_quickly(put: Callable[[object, str, object], None] = setattr) -> None:
    """From here on in this process, and in what it forks: by this lab's own kernels' package, and by the versions of it
    that a race imports under other names."""
    from cudadent42.versions import loading
    from flashmoe_science.jit import host

    put(host.InstructionSet, "flags", property(_flags_of(host)))

    def execute_and_change(loader: SourceFileLoader, module: ModuleType) -> None:
        SourceFileLoader.exec_module(loader, module)
        if module.__name__.endswith(".flashmoe_science.jit.host") and hasattr(module, "feature_flags"):
            setattr(module.InstructionSet, "flags", property(_flags_of(module)))  # noqa: B010 - an enumeration's

    put(loading._Loader, "exec_module", execute_and_change)


def _flags_of(host: Any) -> Callable[[Any], tuple[str, ...]]:
    """`InstructionSet.flags` of that module."""
    taken = host.choose_instruction_set()

    def flags(each: Any) -> tuple[str, ...]:
        usual: tuple[str, ...] = host.feature_flags(each.features)
        return usual if each is taken else (*usual, "-O1")

    return flags
