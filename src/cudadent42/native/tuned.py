"""Kernels in files of their own, as a tuning left them (docs/tuning.md)."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import replace
from pathlib import Path

from cudadent42.base.errors import UsageError
from cudadent42.model.cases import plain_fields
from cudadent42.native import specification
from cudadent42.native.specification import Specification
from cudadent42.operations.attention.case import AttentionCase
from flashmoe_science.tuned.lookup import KERNELS_FOLDER, lookup, warn_unusable

HEADERS = ("*.h", "*.hpp", "*.cuh")
"""Beside a kernel's source, these are taken to be included by it."""


def table_name(kernel: Specification) -> str:
    """As tables of tuned configurations call it."""
    return f"file:{kernel.name}"


def files_of(kernel: Specification) -> list[Path]:
    """What a kernel is compiled from: its TOML file, its source, and the headers beside that."""
    headers = sorted(header for pattern in HEADERS for header in kernel.source.parent.glob(pattern))
    return [kernel.path, kernel.source, *headers]


def sources_digest(kernel: Specification) -> str:
    """SHA-256 of what is in `files_of`."""
    digest = hashlib.sha256()
    for path in files_of(kernel):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def tuned_for(kernel: Specification, case: AttentionCase, device: str, multiprocessors: int) -> Specification:
    """The kernel, in the configuration that a table has for the case on a device; as it is where none has one."""
    digest = functools.partial(_digest, kernel)
    for tuned in lookup((table_name(kernel),), digest, device, multiprocessors, plain_fields(case)):
        try:
            chosen = specification.load(tuned.table.parent / KERNELS_FOLDER / tuned.entry.file)
        except UsageError as error:
            warn_unusable(tuned, str(error).partition("\n")[0])
        else:
            return replace(chosen, name=kernel.name, path=kernel.path, description=tuned.reason)
    return kernel


def _digest(kernel: Specification, _: str) -> str:
    return sources_digest(kernel)
