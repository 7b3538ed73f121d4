"""This project's attention kernels with parts of their work left out, and which kernel a case compiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cudadent42.model.dtypes import DTYPES
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.operations.attention.inputs import AttentionInputs
from cudadent42.operations.interface import Parts
from flashmoe_science.configs.ablation import Ablation as Part

if TYPE_CHECKING:
    from cudadent42.model.implementations import Call
    from flashmoe_science.cuda.device import Device
    from flashmoe_science.jit.nvrtc import CudaKernel


def without(case: AttentionCase, inputs: AttentionInputs) -> Parts:
    """The kernel that serves the case on its device, whole and without each part that it can do without."""
    return (_on_cpu if inputs.query.is_cpu else _on_cuda)(case, inputs)


def compiled(case: AttentionCase, device: Device) -> CudaKernel:
    """What a call of the case compiles, by the choice that this source makes."""
    from flashmoe_science.cuda.attention import compiled as compiled_of
    from flashmoe_science.cuda.attention import explain

    def tensor(heads: int, rows: int) -> Tensor:
        return torch.empty(case.batch, heads, rows, case.head_dim, dtype=DTYPES[case.dtype], device="meta")

    keys = tensor(case.num_kv_heads, case.seqlen_k)
    choice = explain(tensor(case.num_heads, case.seqlen_q), keys, keys, causal=case.causal, device=device)
    return compiled_of(choice, DTYPES[case.dtype], device.architecture)


def _on_cuda(case: AttentionCase, inputs: AttentionInputs) -> Parts:
    from flashmoe_science.cuda.attention import KernelKind, explain, forward
    from flashmoe_science.cuda.choice import Choice

    tensors = inputs.tensors
    choice = explain(*tensors, causal=case.causal, softmax_scale=inputs.softmax_scale)
    if choice.kernel is KernelKind.SMALL:
        return Parts(
            {}, "parts of the small kernel cannot be left out, only of the Hopper and the portable kernel"
        )

    def variant(part: Part) -> Call:
        configured: Choice = replace(choice, configuration=replace(choice.configuration, ablation=part))

        def call() -> Tensor:
            scale = inputs.softmax_scale
            return forward(*tensors, causal=case.causal, softmax_scale=scale, choice=configured)[0]

        return call

    masked = case.causal or case.seqlen_k % choice.configuration.block_n != 0
    return _without(_parts(masked), variant)


def _on_cpu(case: AttentionCase, inputs: AttentionInputs) -> Parts:
    from flashmoe_science.cpu import attention

    def variant(part: Part) -> Call:
        return attention.without(part, *inputs.tensors, causal=case.causal)

    # One row of a causal mask, aligned bottom-right, sees every key.
    return _without(_parts(case.causal and case.seqlen_q > 1), variant)


def _parts(masked: bool) -> list[Part]:
    return [Part.NONE, Part.EXPONENTIALS, *([Part.MASK] if masked else []), Part.LOADS]


def _without(parts: Sequence[Part], variant: Callable[[Part], Call]) -> Parts:
    return Parts({part.name.lower(): variant(part) for part in parts})
