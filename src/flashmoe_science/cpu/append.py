"""`paged_append` as one call of a kernel on the CPU (`kernels/cpu/paged_append.cpp`)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

from flashmoe_science.cpu.library import ELEMENT_TYPES, load_function
from flashmoe_science.jit import host
from flashmoe_science.jit.host import InstructionSet
from flashmoe_science.varlen.append_arguments import ARGUMENTS, Append, pack_into, why_not


def takes(append: Append) -> bool:
    """Whether there is a kernel for a call."""
    return why_not(append, tuple(ELEMENT_TYPES)) is None


def run(
    append: Append, query_out: torch.Tensor | None, instruction_set: InstructionSet | None = None
) -> None:
    """For calls that it takes; ``query_out``: (tokens, heads, head_dim), contiguous.

    Args:
        instruction_set: whose code; the CPU's best unless given.
    """
    buffer = ctypes.create_string_buffer(ARGUMENTS.size)
    pack_into(buffer, append, query_out)
    launch = _load(instruction_set or host.choose_instruction_set())
    launch(ctypes.addressof(buffer), ELEMENT_TYPES[append.key.dtype], torch.get_num_threads())


@functools.cache
def _load(instruction_set: InstructionSet) -> Callable[..., int]:
    return load_function("paged_append", "flashmoe_paged_append_method", instruction_set)
