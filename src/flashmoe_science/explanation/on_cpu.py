"""On a CPU a function has one kernel: what is chosen is the instruction set that it is compiled for."""

from __future__ import annotations

from flashmoe_science.errors import InputError
from flashmoe_science.explanation.record import Arguments, Explainable, Explanation
from flashmoe_science.jit import host


def explained_on_cpu(record: Explainable, arguments: Arguments) -> Explanation:
    """Raises InputError for arguments that make no sense, or that are not on the CPU."""
    tensor = record.check(arguments)
    if not tensor.is_cpu:
        raise InputError(
            f"the tensors are on {tensor.device}, which has no kernels; name a GPU, as in gpu='H200', or move them"
        )
    chosen = host.choose_instruction_set()
    available = host.available_instruction_sets()
    others = []
    for other in host.InstructionSet:
        if other is chosen:
            continue
        if missing := host.missing_for(other):
            others.append((other.value, f"the CPU lacks {', '.join(missing)}"))
        elif chosen is available[0]:
            others.append((other.value, f"the CPU has it, and {chosen.value} is faster"))
        else:
            others.append((other.value, f"{host.INSTRUCTION_SET_VARIABLE} asks for {chosen.value}"))
    reason = "the best that this CPU runs"
    if chosen is not available[0]:
        reason = f"as {host.INSTRUCTION_SET_VARIABLE} asks"
    if chosen is host.InstructionSet.AMX and record.on_matrix_unit is not None:
        multiplies = record.on_matrix_unit(arguments)
        unit = "with its matrix unit where there are rows enough" if multiplies else "without its matrix unit"
        reason = f"{reason}, {unit}"
    return Explanation(
        operation=record.name,
        device="cpu",
        kernel=record.cpu_kernel(arguments),
        configuration=chosen.value,
        reason=", with ".join((reason, *record.further(arguments, chosen))),
        others=tuple(others),
    )
