"""The operators that there are, and what PyTorch asks about each: they register where they are defined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._ops import OpOverload

_operators: dict[str, Operator] = {}


@dataclass(frozen=True)
class Operator:
    """What others ask about an operator. Each has to answer all, so no list of them is kept elsewhere."""

    overload: OpOverload[..., Any]
    flops: Callable[..., int] | str
    """Its floating-point operations, of the shapes of its arguments: see `flops`. Or why there is no such formula."""
    sharding: Callable[..., Any] | None
    """How DTensors pass through it without being gathered: see `sharding`. None: PyTorch refuses DTensors."""
    kept: bool
    """Whether selective checkpointing keeps its results, as they are worth their memory: see `checkpoint`."""

    @property
    def name(self) -> str:
        """In ``torch.ops.flashmoe_science``."""
        return str(self.overload.overloadpacket.__name__)


def register(operator: Operator) -> None:
    """Add an operator to `operators`."""
    _operators[operator.name] = operator


def operators() -> tuple[Operator, ...]:
    """All that are defined, by their names: with the package of operators all of this project's are."""
    return tuple(_operators[name] for name in sorted(_operators))
