"""Which kernel a call of attention takes: the one place where that is decided."""

from __future__ import annotations

import torch

from flashmoe_science.configs.attention import hopper as hopper_configs
from flashmoe_science.configs.attention import portable as portable_configs
from flashmoe_science.configs.attention import small as small_configs
from flashmoe_science.configs.attention.hopper import HopperConfiguration
from flashmoe_science.configs.attention.portable import PortableConfiguration
from flashmoe_science.configs.attention.small import SmallConfiguration
from flashmoe_science.cuda.attention import hopper, portable, small
from flashmoe_science.cuda.attention.problem import KernelKind, Problem
from flashmoe_science.cuda.choice import DTYPE_NAMES, Choice, KernelModule, Selection, Tuned
from flashmoe_science.cuda.device import Device
from flashmoe_science.jit.nvrtc import CudaKernel

OVERRIDE_VARIABLE = "FLASHMOE_CUDA_KERNEL"
_PREFERENCE = (KernelKind.SMALL, KernelKind.HOPPER, KernelKind.PORTABLE)
_PREFERENCE_FOR_FEW_TILES = (KernelKind.SMALL, KernelKind.PORTABLE, KernelKind.HOPPER)
_FEW_TILES_ROWS = 64
_FEW_TILES_KEYS = 256
_FEW_TILES_HEAD_DIM = 64


def _preference(problem: Problem, device: Device) -> tuple[KernelKind, ...]:
    """Up to head dim 64, tiles of 64 rows that all find a place at once and see few keys are done by the portable
    kernel before the Hopper kernel has set up its pipeline (H200: 4.2 against 4.8 us at 64 heads of 128 rows; at 8
    heads of 512 rows and keys, or at head dim 128, it is the other way round).
    """
    tiles = problem.batch * problem.num_heads * -(-problem.seqlen_q // _FEW_TILES_ROWS)
    few = (
        problem.head_dim <= _FEW_TILES_HEAD_DIM
        and problem.seqlen_k <= _FEW_TILES_KEYS
        and tiles <= device.multiprocessors
    )
    return _PREFERENCE_FOR_FEW_TILES if few else _PREFERENCE


def fields(problem: Problem) -> dict[str, int | bool | str]:
    """A problem by the names that regions of tuned configurations use: those of the lab's cases."""
    return {
        "dtype": DTYPE_NAMES[problem.dtype],
        "batch": problem.batch,
        "num_heads": problem.num_heads,
        "num_kv_heads": problem.num_kv_heads,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "head_dim": problem.head_dim,
        "causal": problem.causal,
    }


TUNED = Tuned[Problem](
    operation="attention",
    configurations={
        KernelKind.SMALL: SmallConfiguration,
        KernelKind.HOPPER: HopperConfiguration,
        KernelKind.PORTABLE: PortableConfiguration,
    },
    tunable={
        KernelKind.SMALL: small_configs.TUNABLE,
        KernelKind.HOPPER: hopper_configs.TUNABLE,
        KernelKind.PORTABLE: portable_configs.TUNABLE,
    },
    sources={
        KernelKind.SMALL: ("attention_small.cu",),
        KernelKind.HOPPER: ("attention_hopper.cu",),
        KernelKind.PORTABLE: ("attention_portable.cu",),
    },
    fields=fields,
    declined={KernelKind.SMALL: small.configuration_for},
)

FORWARD = Selection[Problem](
    modules={KernelKind.SMALL: small, KernelKind.HOPPER: hopper, KernelKind.PORTABLE: portable},
    override_variable=OVERRIDE_VARIABLE,
    noun="CUDA kernel",
    describe=lambda problem: f"{problem.dtype} with head_dim {problem.head_dim}",
    instead="float16, or torch's scaled_dot_product_attention",
    preference=_preference,
    tuned=TUNED,
)
select, plan = FORWARD.select, FORWARD.plan


def module(kind: KernelKind) -> KernelModule[Problem]:
    return FORWARD.modules[kind]


def kernels(architecture: str) -> list[CudaKernel]:
    """Everything that a call of attention could take on an architecture."""
    return FORWARD.kernels(architecture)


def compiled(choice: Choice, dtype: torch.dtype, architecture: str) -> CudaKernel:
    """What is compiled for a choice on an architecture."""
    if choice.kernel is KernelKind.HOPPER:
        return hopper.kernel(choice.configuration, dtype)
    if choice.kernel is KernelKind.PORTABLE:
        return portable.kernel(choice.configuration, dtype, architecture)
    return small.kernel(choice.configuration, dtype, architecture)
