"""How DTensors pass through the operators without being gathered: by batch and by heads, or by tokens.

PyTorch's module for DTensors takes a second to import, and most processes have none of them; so the rules are
registered when somebody has imported it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from flashmoe_science.operators.registered import operators


def register_where_used() -> None:
    """Register the rules if the process has DTensors."""
    if "torch.distributed.tensor" in sys.modules:
        register()


@functools.cache
def register() -> None:
    """Register the rules. Nobody has to call it but who passes DTensors to ``torch.ops.flashmoe_science`` in inference
    mode, and imported `torch.distributed.tensor` later than this package.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    shardings: Any = DTensor._op_dispatcher.sharding_propagator
    for each in operators():
        if each.sharding is None:
            continue
        wrap: Callable[[Any], Any] = register_sharding(each.overload)
        wrap(each.sharding)
        # PyTorch says of a call what it said of the last one with such tensors, and compares other arguments from the
        # first whole number on. But which gradients are needed, or whether z is kept, decides what results there are.
        shardings.op_to_schema_info[each.overload] = RuntimeSchemaInfo(
            _first_option(each.overload), needs_pytree=True
        )


def _first_option(operator: Any) -> int:
    """The place of the first argument that is not always a tensor."""
    types = [str(argument.type) for argument in operator._schema.arguments]
    return next((number for number, kind in enumerate(types) if kind != "Tensor"), len(types))


Rule = list[tuple[list[Any], list[Any]]]
"""Each way that an operator accepts: placements of its results, and of its tensors."""
