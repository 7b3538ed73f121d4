"""One problem of an operation: its sizes and dtype, and what follows from them without measuring.

A case is of one of many types, one for each operation. The operation's name is written with it, and decides as what it
is read back. Operations are found by name: they are the folders of ``cudadent42.operations``, and what other packages
publish under the entry-point group of that name.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Any, ClassVar, Protocol, runtime_checkable

from cudadent42.base.extensions import ExtensionPoint
from cudadent42.base.serialise import Tagged


class Case(Protocol):
    """What planning, timing, comparing and reporting use of a case. The rest belongs to its operation.

    A case is a frozen dataclass; these are its fields or properties.
    """

    operation: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str:
        """As its suite has it."""

    @property
    def dtype(self) -> str:
        """``fp16``, ``bf16`` or ``fp32``."""

    @property
    def id(self) -> str:
        """Unique in a plan: ``name/dtype``."""

    @property
    def tokens(self) -> int:
        """What the throughput counts."""

    @property
    def flops(self) -> int:
        """Floating-point operations that the result takes."""

    @property
    def bytes_min(self) -> int:
        """Fewest bytes moved: what is read once and written once."""

    def memory_bytes(self, sets: int) -> int:
        """Bytes of so many sets of inputs, with an output each."""


@runtime_checkable
class HasCaseType(Protocol):
    """What the lab knows of an operation, as far as reading its cases needs it: `operations.interface.Definition`."""

    @property
    def case_type(self) -> type[Any]: ...


OPERATIONS = ExtensionPoint("operation", "cudadent42.operations", "OPERATION")
"""All operations that can be raced, each under its name."""

DEFAULT_OPERATION = "attention"
"""Of a suite, a kernel's file and an implementation that name none."""


def case_type(operation: str) -> type[Any]:
    """The type of an operation's cases. Raises UsageError for an operation that is not known here."""
    definition = OPERATIONS.load(operation)
    if not isinstance(definition, HasCaseType):
        raise TypeError(
            f"the operation {operation!r} is a {type(definition).__name__}; expected a Definition"
        )
    return definition.case_type


def untagged_operation(fields: Collection[str]) -> str:
    """The operation of a record that does not name one, as none did when there were these two."""
    return "moe" if "experts" in fields else DEFAULT_OPERATION


TAGGED = Tagged("operation", case_type, untagged_operation, OPERATIONS.built_in)
"""How a record's field is written and read that holds cases of any operation: ``field(metadata=TAGGED.metadata)``."""


def element_bytes(dtype: str) -> int:
    return 4 if dtype == "fp32" else 2


def plain_fields(case: Case) -> dict[str, int | bool | str]:
    """The sizes, switches and words of a case but for its name: what tables of tuned configurations speak of."""
    values = {field.name: getattr(case, field.name) for field in fields(case) if field.name != "name"}
    return {name: value for name, value in values.items() if isinstance(value, int | str)}


def is_plain(case: Case) -> bool:
    """Whether all that a case says besides is what it says by default: no strides or scale of its own."""
    plain = plain_fields(case)
    others = [field for field in fields(case) if field.name != "name" and field.name not in plain]
    return all(getattr(case, field.name) == field.default for field in others)
