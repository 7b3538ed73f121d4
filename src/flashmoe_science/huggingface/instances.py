"""Another `forward` for one module, whose class stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch


def replace_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> None:
    """Let the module's calls be those of a function, which gets the module first.

    A deep copy and a replica of `torch.nn.DataParallel` have it for themselves; what was pickled has its class's own.
    """
    attributes: Any = module
    attributes.forward = MethodType(forward, module)
    # A replica starts with its original's attributes, the methods bound to the original among them.
    attributes._replicate_for_data_parallel = MethodType(_replicate_for_data_parallel, module)


def is_hooked(module: torch.nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether somebody else's function stands in the place of the module's own `forward`, or of this one."""
    current = vars(module).get("forward")
    return current is not None and getattr(current, "__func__", None) not in (forward, type(module).forward)


def restore_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether the module's calls are its class's own again, where they were this function's. A hook stays."""
    if is_hooked(module, forward):
        return False
    for name in ("forward", "_replicate_for_data_parallel"):
        vars(module).pop(name, None)
    return True


def _replicate_for_data_parallel(module: Any) -> Any:
    """Of the name of what it replaces: by that name a pickle has it, the class's own."""
    replica = type(module)._replicate_for_data_parallel(module)
    replace_forward(replica, module.forward.__func__)
    return replica
