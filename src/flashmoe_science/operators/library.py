"""Defining operators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from flashmoe_science.operators.compiled_code import follow_the_operators
from flashmoe_science.operators.flops import count_by
from flashmoe_science.operators.registered import Operator, register

if TYPE_CHECKING:
    from torch._ops import OpOverload

LIBRARY: Any = torch.library.Library("flashmoe_science", "DEF")  # type: ignore[no-untyped-call]

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
"""Inductor keeps the strides that a tensor has in eager code: a last one that is not 1 would be refused."""


def define(
    schema: str,
    *,
    cpu: Callable[..., Any],
    cuda: Callable[..., Any],
    fake: Callable[..., Any],
    recorded: Callable[..., Any],
    flops: Callable[..., int] | str,
    sharding: Callable[..., Any] | None,
    kept: bool = False,
) -> OpOverload[..., Any]:
    """A new functional operator, registered with what PyTorch asks about it.

    The functions take the schema's arguments with the schema's defaults: the dispatcher leaves out what equals them.

    Args:
        schema: "name(arguments) -> results".
        cpu, cuda: the operator for tensors of that device.
        fake: results of the right shapes, strides, dtypes and devices, whose contents do not matter.
        recorded: what autograd makes of a call; it ends in `recording.below_autograd`.
        flops, sharding, kept: see `registered.Operator`.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=_TAGS)
    LIBRARY.impl(name, cpu, "CPU")
    LIBRARY.impl(name, cuda, "CUDA")
    LIBRARY.impl(name, recorded, "Autograd")

    @functools.wraps(fake)
    def fake_while_compiling(*arguments: Any, **named: Any) -> Any:
        follow_the_operators()
        return fake(*arguments, **named)

    torch.library.register_fake(f"flashmoe_science::{name}", fake_while_compiling, lib=LIBRARY)
    operator: OpOverload[..., Any] = getattr(torch.ops.flashmoe_science, name).default
    if not isinstance(flops, str):
        count_by(operator, flops)
    register(Operator(operator, flops, sharding, kept))
    return operator
