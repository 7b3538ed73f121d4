"""What a call of attention backward asks for, and what was chosen: the records of its CUDA backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

from flashmoe_science.cuda.attention.problem import Strides
from flashmoe_science.cuda.device import Device
from flashmoe_science.gradients import Needs
from flashmoe_science.jit.nvrtc import CudaKernel


class BackwardKind(Enum):
    """The kernels of attention backward for CUDA."""

    PORTABLE = "portable"


@dataclass(frozen=True)
class BackwardProblem:
    """One call of attention backward: shapes, layout and options."""

    batch: int
    num_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: torch.dtype
    causal: bool
    softmax_scale: float
    needs: Needs
    query_strides: Strides
    key_strides: Strides
    value_strides: Strides
    output_strides: Strides
    grad_output_strides: Strides
    grad_query_strides: Strides
    grad_key_strides: Strides
    grad_value_strides: Strides

    @property
    def statistics_rows(self) -> int:
        """Rows per head of the two arrays of statistics: 16 bytes' worth of float32 at least, so that each head's start at
        a multiple of 16 bytes.
        """
        return -(-self.seqlen_q // 4) * 4


@dataclass(frozen=True)
class BackwardChoice:
    """Which kernel a problem takes, and how it is configured."""

    kernel: BackwardKind
    configuration: Any
    """What the kernel's module takes, e.g. `configs.attention.backward.PortableBackward`."""
    reason: str = ""


BackwardLaunch = Callable[[int, int, int, int, int, int, int, int, int, int, int, int], None]
"""Launches on a raw stream: (query, key, value, output, grad_output, lse, grad_lse, grad_query, grad_key, grad_value,
workspace, stream), addresses of the tensors' first elements. That of `grad_lse`, of a gradient that is not needed, and of a
workspace without elements may be 0.
"""


@dataclass(frozen=True)
class BackwardPlan:
    """A prepared call: everything but the addresses. Belongs to one thread and one device."""

    launch: BackwardLaunch
    workspace: int
    """Scratch memory of each call, in float32 elements; starts at a multiple of 512 bytes, uninitialised."""


class BackwardModule(Protocol):
    """What the module of one kernel kind provides."""

    def choose(self, problem: BackwardProblem, device: Device) -> BackwardChoice | None:
        """The configuration for a problem; None if this kernel cannot or should not take it."""
        ...

    def kernels(self, architecture: str) -> list[CudaKernel]:
        """Everything that `choose` can lead to on an architecture, for building ahead of time."""
        ...

    def plan(
        self, problem: BackwardProblem, configuration: Any, device: Device, *, allow_defects: bool = False
    ) -> BackwardPlan:
        """Check, compile (or find) the kernels, load them, and prepare the launches. The device is current.

        InputError if the kernel cannot do the problem in this configuration. KernelDefectError, unless they are allowed,
        if a kernel spills and the like: see `jit.nvrtc.compile_kernel`.
        """
        ...
