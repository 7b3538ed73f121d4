"""CPU kernels of instruction sets that calls on this CPU do not take are compiled with little of the optimiser.

Source and intrinsics are the same, and so are the bits, as no flag lets a compiler change the order of operations. With
``--slow``, and where ``FLASHMOE_CPU_ISA`` names an instruction set, all are compiled as users do.
"""

from __future__ import annotations

from collections.abc import Callable


def compile_lesser_ones_quickly(put: Callable[[object, str, object], None] = setattr) -> None:
    """From here on in this process, and in what it forks."""
    from flashmoe_science.jit import host

    taken = host.choose_instruction_set()

    def flags(each: host.InstructionSet) -> tuple[str, ...]:
        usual = host.feature_flags(each.features)
        return usual if each is taken else (*usual, "-O1")

    put(host.InstructionSet, "flags", property(flags))
