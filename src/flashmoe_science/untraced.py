"""Functions that torch.compile leaves outside its graphs, or asks while it makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

try:
    # Imports Dynamo at its first call, which only compiled code makes: the public decorator imports all of it with
    # this package.
    from torch._compile import _disable_dynamo as _disable
except ImportError:  # private: another torch may not have it
    _disable = torch.compiler.disable

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """The function as a graph break of code that torch.compile compiles."""
    wrapped: Callable[P, R] = _disable(function)
    return wrapped


def constant_result(function: Callable[P, R]) -> Callable[P, R]:
    """The function as one that torch.compile calls once, while it traces, with arguments that are no tensors; its
    result is a constant of the graph, in which nothing else is left of it.
    """
    wrapped: Callable[P, R] = torch.compiler.assume_constant_result(function)  # type: ignore[no-untyped-call]
    return wrapped
