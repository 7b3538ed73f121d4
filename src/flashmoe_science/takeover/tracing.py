"""Functions that torch.compile asks while it makes a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def constant_result(function: Callable[P, R]) -> Callable[P, R]:
    """The function as one that torch.compile calls once, while it traces, with arguments that are no tensors; its
    result is a constant of the graph, in which nothing else is left of it.
    """
    wrapped: Callable[P, R] = torch.compiler.assume_constant_result(function)  # type: ignore[no-untyped-call]
    return wrapped
