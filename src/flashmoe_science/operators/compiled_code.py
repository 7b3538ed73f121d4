"""What PyTorch's compiler keeps between processes follows the version of the operators.

A cached graph holds what the operators said while it was traced: the strides of their results, and the backward pass
that autograd recorded. The cache's key has their names and no more, so another version of this package would be handed
that of the one before. `torch.compiler.config.cache_key_tag` is part of every key.
"""

from __future__ import annotations

import functools
import hashlib
from importlib import resources
from typing import Any

import torch.compiler.config

_CONFIG: Any = torch.compiler.config


def follow_the_operators() -> None:
    """Add the operators' version to the keys of what this thread compiles from now on.

    A setting of PyTorch holds in one thread, and a user may set the tag at any time; so each fake kernel calls this.
    The compiler runs one before it looks into its cache.
    """
    tag: str = _CONFIG.cache_key_tag
    if version() not in tag:
        _CONFIG.cache_key_tag = f"{tag};{version()}" if tag else version()


@functools.cache
def version() -> str:
    """``flashmoe_science=DIGEST``, of the sources of the operators."""
    modules = resources.files("flashmoe_science.operators").iterdir()
    sources = sorted((module.name, module.read_bytes()) for module in modules if module.name.endswith(".py"))
    digest = hashlib.sha256()
    for name, source in sources:
        digest.update(f"{name} {len(source)}\n".encode() + source)
    return f"flashmoe_science={digest.hexdigest()[:16]}"
