"""The operations that can be raced: everything that depends on which one it is, a folder each.

A folder's package has an ``OPERATION``, an `interface.Definition`. Other packages publish theirs under the entry-point
group ``cudadent42.operations``. No table names them; docs/add-an-operation.md shows how to add one.
"""

from __future__ import annotations

from typing import Any

from cudadent42.model.cases import OPERATIONS, Case
from cudadent42.operations.interface import Definition, Numerics


def names() -> tuple[str, ...]:
    """All operations. Imports none."""
    return OPERATIONS.names()


def definition(operation: str) -> Definition[Any, Any]:
    """What planning, recording and reporting need to know of it. Raises UsageError for one that is not known here."""
    loaded = OPERATIONS.load(operation)
    if not isinstance(loaded, Definition) or loaded.operation != operation:
        raise TypeError(f"the operation {operation!r} is a {loaded!r}; expected its Definition")
    return loaded


def numerics(case: Case) -> Numerics[Any, Any]:
    """Inputs, reference and adversarial inputs of a case's operation. Imports torch."""
    return definition(case.operation).numerics()
