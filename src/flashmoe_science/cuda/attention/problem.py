"""What a call of attention asks for, and what was chosen: the records of its CUDA backend."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.launch import Launch
from flashmoe_science.jit.nvrtc import CudaKernel

Strides = tuple[int, int, int]
"""Of (batch, head, row), in elements; the head dimension is contiguous."""


class KernelKind(Enum):
    """The attention kernels for CUDA."""

    SMALL = "small"
    HOPPER = "hopper"
    PORTABLE = "portable"


@dataclass(frozen=True)
class Problem:
    """One call of attention forward: shapes, layout and options."""

    batch: int
    num_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: torch.dtype
    causal: bool
    softmax_scale: float
    return_lse: bool
    query_strides: Strides
    key_strides: Strides
    value_strides: Strides
    output_strides: Strides


@dataclass(frozen=True)
class Choice:
    """Which kernel a problem takes, and how it is configured."""

    kernel: KernelKind
    configuration: Any
    """What the kernel's module takes, e.g. `configs.portable.PortableConfiguration`."""
    reason: str = ""


class LaunchPlan(Protocol):
    """A prepared launch: everything but the addresses. Belongs to one thread and one device."""

    @property
    def launch(self) -> Launch: ...


class KernelModule(Protocol):
    """What the module of one kernel kind provides."""

    def choose(self, problem: Problem, device: Device) -> Choice | None:
        """The configuration for a problem; None if this kernel cannot or should not take it."""
        ...

    def kernels(self, architecture: str) -> list[CudaKernel]:
        """Everything that `choose` can lead to on an architecture, for building ahead of time."""
        ...

    def check(self, problem: Problem, configuration: Any) -> None:
        """InputError unless the kernel can do the problem in this configuration, whether or not `choose` would."""
        ...

    def plan(
        self, problem: Problem, configuration: Any, device: Device, *, allow_defects: bool = False
    ) -> LaunchPlan:
        """Check, compile (or find) the kernel, load it, and prepare the launch. The device is current.

        KernelDefectError, unless they are allowed, if it spills and the like: see `jit.nvrtc.compile_kernel`.
        """
        ...
