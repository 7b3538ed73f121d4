"""The operations that can be raced: everything that depends on which one it is.

To add one: a case in `cudadent42.model.cases`, and a package here with a `Definition`.
"""

from __future__ import annotations

from typing import Any

from cudadent42.model.cases import Case, Operation
from cudadent42.operations.interface import Definition, Numerics


def definition(operation: Operation) -> Definition[Any, Any]:
    """What planning, recording and reporting need to know of it."""
    if operation is Operation.MOE:
        from cudadent42.operations.moe import MOE

        return MOE
    from cudadent42.operations.attention import ATTENTION

    return ATTENTION


def numerics(case: Case) -> Numerics[Any, Any]:
    """Inputs, reference and adversarial inputs of a case's operation. Imports torch."""
    return definition(case.operation).numerics()
