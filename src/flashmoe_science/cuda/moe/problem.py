"""What a mixture-of-experts call asks for, and what was chosen: the records of its CUDA backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

from flashmoe_science.cuda.device import Device
from flashmoe_science.jit.nvrtc import CudaKernel
from flashmoe_science.moe_arguments import Activation, W13Layout


class MoeKind(Enum):
    """The ways through a mixture-of-experts layer on CUDA."""

    FEW = "few"
    HOPPER = "hopper"
    PORTABLE = "portable"


@dataclass(frozen=True)
class MoeProblem:
    """One call: shapes and options. All tensors are contiguous.

    Nothing of where the tokens are routed: choices made from it hold for every routing, so that a captured graph may
    be replayed with another.
    """

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    dtype: torch.dtype
    activation: Activation
    w13_layout: W13Layout
    ids64: bool
    """The expert ids are int64, otherwise int32."""

    @property
    def slots(self) -> int:
        """Pairs of a token and one of its experts; slot = token * top_k + j."""
        return self.tokens * self.top_k

    @property
    def gated(self) -> bool:
        return self.activation.gated

    @property
    def w13_rows(self) -> int:
        """Rows of one expert's first weight."""
        return self.intermediate * (2 if self.gated else 1)

    @property
    def rows_per_expert(self) -> float:
        """Mean number of slots of an expert."""
        return self.slots / self.experts


@dataclass(frozen=True)
class MoeChoice:
    """Which way a problem takes, and how that is configured."""

    kind: MoeKind
    configuration: Any
    """What the module of that kind takes."""
    reason: str = ""


MoeLaunch = Callable[[int, int, int, int, int, int, int, int], None]
"""Launches all kernels in order on a raw stream: (hidden_states, w13, w2, topk_weights, topk_ids, output, workspace,
stream), addresses of the tensors' first elements. The workspace is `MoePlan.workspace_bytes` long, starts at a multiple
of 256 bytes and has any content.
"""


class MoePlan(Protocol):
    """A prepared call: everything but the addresses. Belongs to one thread and one device."""

    @property
    def workspace_bytes(self) -> int: ...

    @property
    def launch(self) -> MoeLaunch: ...


class MoeModule(Protocol):
    """What the module of one kind provides."""

    def choose(self, problem: MoeProblem, device: Device) -> MoeChoice | None:
        """The configuration for a problem (of at least one token); None if this kind cannot or should not take it."""
        ...

    def kernels(self, architecture: str) -> list[CudaKernel]:
        """Everything that `choose` can lead to on an architecture, for building ahead of time."""
        ...

    def check(self, problem: MoeProblem, configuration: Any) -> None:
        """InputError unless this kind can do the problem in this configuration, whether or not `choose` would."""
        ...

    def plan(
        self, problem: MoeProblem, configuration: Any, device: Device, *, allow_defects: bool = False
    ) -> MoePlan:
        """Check, compile (or find) the kernels, load them, and prepare the launches. The device is current.

        KernelDefectError, unless they are allowed, if one spills and the like: see `jit.nvrtc.compile_kernel`.
        """
        ...
