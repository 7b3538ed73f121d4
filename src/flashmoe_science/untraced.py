"""Functions that torch.compile leaves outside its graphs."""

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
