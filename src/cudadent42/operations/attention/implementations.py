"""The implementations of attention that come with the lab. Nothing is imported before it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from cudadent42.model.implementations import OUR_PACKAGE, Call, Implementation, UnsupportedCaseError
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.operations.peers import needs
from cudadent42.operations.variants import Variant, Variants, choice, compiled, configurations, makes_variants

if TYPE_CHECKING:
    from torch import Tensor

    from cudadent42.operations.attention.inputs import AttentionInputs
    from flashmoe_science.cuda.attention import Problem
    from flashmoe_science.cuda.choice import Choice
    from flashmoe_science.cuda.device import Device


# ---------------------------------------------------------------- PyTorch


def prepare_sdpa(case: AttentionCase, inputs: AttentionInputs) -> Call:
    """PyTorch's SDPA with this project's conventions.

    ``is_causal`` aligns top-left, which equals bottom-right only for equal lengths. Fewer queries than keys
    take PyTorch's own bottom-right bias; with more queries than keys the first rows see no key and are
    zeros, and the rest is the equal-lengths case.
    """
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    query, key, value = inputs.query, inputs.key, inputs.value
    grouped = query.shape[1] != key.shape[1]
    empty = max(0, case.seqlen_q - case.seqlen_k) if case.causal else 0
    call = partial(sdpa, key=key, value=value, scale=inputs.scale, enable_gqa=grouped)
    if case.seqlen_k == 0 or case.seqlen_q == 0:
        return lambda: query.new_zeros(query.shape)
    if case.causal and empty:

        def padded() -> Tensor:
            result = query.new_zeros(query.shape)
            result[:, :, empty:] = call(query[:, :, empty:], is_causal=True)
            return result

        return padded
    if case.causal and case.seqlen_q < case.seqlen_k:
        # Here, and not above: it imports the machinery of torch.compile, a second of a processor.
        from torch.nn.attention.bias import causal_lower_right

        bias: Any = causal_lower_right(case.seqlen_q, case.seqlen_k)
        return partial(call, query, attn_mask=bias)
    return partial(call, query, is_causal=case.causal)


def _sdpa_backend(name: str, backend: str, devices: tuple[str, ...]) -> Implementation:
    def context() -> AbstractContextManager[object]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel(getattr(SDPBackend, backend))

    description = f"PyTorch SDPA, {backend.replace('_', ' ').lower()} backend only"
    return Implementation(name, description, devices, prepare_sdpa, context=context, strict=False)


# ---------------------------------------------------------------- this project's kernels


def _prepare_ours(case: AttentionCase, inputs: AttentionInputs) -> Call:
    attention = importlib.import_module("flashmoe_science").flash_attention
    return partial(
        attention,
        inputs.query,
        inputs.key,
        inputs.value,
        causal=case.causal,
        softmax_scale=inputs.softmax_scale,
    )


def _prepare_variant(variant: Variant, case: AttentionCase, inputs: AttentionInputs) -> Call:
    query, key, value, causal = inputs.query, inputs.key, inputs.value, case.causal
    scale = inputs.softmax_scale
    if query.is_cpu:
        on_cpu = partial(
            variant.module("cpu.attention").forward,
            *(query, key, value),
            causal=causal,
            softmax_scale=scale,
            return_lse=False,
            instruction_set=variant.instruction_set(),
        )
        return lambda: on_cpu()[0]
    asked, selection = variant.module("cuda.attention.forward").asked, _selection(variant)
    problem, device = asked(query, key, value, causal, scale, False, None)
    made = compiled(variant, selection, problem, device, variant_choice(variant, problem, device))
    forward = variant.module("cuda.attention").forward
    on_cuda = partial(forward, query, key, value, causal=causal, softmax_scale=scale, choice=made)
    return lambda: on_cuda()[0]


def variant_choice(variant: Variant, problem: Problem, device: Device) -> Choice:
    """What a variant is for a problem. Raises UnsupportedCaseError."""
    attention = variant.module("cuda.attention")
    declined = {attention.KernelKind.SMALL: variant.module("cuda.attention.small").configuration_for}
    return choice(variant, _selection(variant), problem, device, declined)


def _selection(variant: Variant) -> Any:
    return variant.module("cuda.attention.select").FORWARD


def variants_of(package: str = OUR_PACKAGE) -> Variants:
    return Variants(
        configurations(
            f"{package}.configs.attention",
            small="SmallConfiguration",
            hopper="HopperConfiguration",
            portable="PortableConfiguration",
        ),
        "cudadent42[portable,block_n=48]",
        lambda variant: partial(_prepare_variant, variant),
        package,
    )


# ---------------------------------------------------------------- peers, never a dependency


def _sequence_first(inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Views as (batch, seq, heads, head_dim), the layout of the peers."""
    return inputs.query.transpose(1, 2), inputs.key.transpose(1, 2), inputs.value.transpose(1, 2)


def _prepare_flash_attn(module: str, case: AttentionCase, inputs: AttentionInputs) -> Call:
    """FlashAttention-2, -3 and -4 share this signature; the later ones return (output, lse)."""
    function = importlib.import_module(module).flash_attn_func
    query, key, value = _sequence_first(inputs)
    causal, scale = case.causal, inputs.scale

    def call() -> Tensor:
        result = function(query, key, value, softmax_scale=scale, causal=causal)
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output.transpose(1, 2)

    return call


def _prepare_flashinfer(case: AttentionCase, inputs: AttentionInputs) -> Call:
    """The ragged prefill wrapper over the flattened batch; planning happens once, as in a server's step."""
    import torch

    flashinfer = importlib.import_module("flashinfer")
    if case.seqlen_q == 0 or case.seqlen_k == 0:
        raise UnsupportedCaseError("flashinfer takes no empty sequences")
    device = inputs.query.device
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")

    def offsets(seqlen: int) -> Tensor:
        return torch.arange(case.batch + 1, dtype=torch.int32, device=device) * seqlen

    wrapper.plan(
        offsets(case.seqlen_q),
        offsets(case.seqlen_k),
        case.num_heads,
        case.num_kv_heads,
        case.head_dim,
        causal=case.causal,
        sm_scale=inputs.scale,
        q_data_type=inputs.query.dtype,
        kv_data_type=inputs.key.dtype,
    )
    query, key, value = (tensor.flatten(0, 1).contiguous() for tensor in _sequence_first(inputs))

    shape = (case.batch, case.seqlen_q, case.num_heads, case.head_dim)

    def call() -> Tensor:
        output: Tensor = wrapper.run(query, key, value)
        return output.view(shape).transpose(1, 2)

    return call


def _prepare_xformers(case: AttentionCase, inputs: AttentionInputs) -> Call:
    ops = importlib.import_module("xformers.ops")
    if case.num_heads != case.num_kv_heads:
        raise UnsupportedCaseError("xformers is raced with equal head counts only")
    query, key, value = _sequence_first(inputs)
    bias = ops.fmha.attn_bias.LowerTriangularFromBottomRightMask() if case.causal else None
    scale = inputs.scale

    def call() -> Tensor:
        output: Tensor = ops.memory_efficient_attention(query, key, value, attn_bias=bias, scale=scale)
        return output.transpose(1, 2)

    return call


def _peer(
    name: str,
    module: str,
    package: str,
    description: str,
    prepare: Callable[[AttentionCase, AttentionInputs], Call],
    *,
    copies_inputs: bool = False,
) -> Implementation:
    unavailable = needs(module, package)
    return Implementation(
        name, description, ("cuda",), prepare, unavailable, strict=False, copies_inputs=copies_inputs
    )


def _flash_attn(name: str, module: str, package: str, description: str) -> Implementation:
    return _peer(name, module, package, description, partial(_prepare_flash_attn, module))


_BOTH = ("cpu", "cuda")

ALL: tuple[Implementation, ...] = (
    Implementation("pytorch", "PyTorch SDPA, its default choice", _BOTH, prepare_sdpa, strict=False),
    Implementation(
        "cudadent42",
        "flashmoe_science.flash_attention",
        _BOTH,
        _prepare_ours,
        variants=makes_variants(variants_of),
    ),
    _sdpa_backend("pytorch_flash", "FLASH_ATTENTION", _BOTH),
    _sdpa_backend("pytorch_cudnn", "CUDNN_ATTENTION", ("cuda",)),
    _sdpa_backend("pytorch_efficient", "EFFICIENT_ATTENTION", ("cuda",)),
    _sdpa_backend("pytorch_math", "MATH", _BOTH),
    _flash_attn("flash_attn", "flash_attn", "flash-attn", "FlashAttention-2"),
    _flash_attn("flash_attn_3", "flash_attn_interface", "tokenspeed-fa3", "FlashAttention-3"),
    _flash_attn("flash_attn_cute", "flash_attn.cute", "flash-attn-4", "FlashAttention-4 (CuTe DSL)"),
    _peer(
        "flashinfer",
        "flashinfer",
        "flashinfer-python",
        "FlashInfer ragged prefill",
        _prepare_flashinfer,
        copies_inputs=True,
    ),
    _peer(
        "xformers",
        "xformers.ops",
        "xformers",
        "xFormers memory-efficient attention",
        _prepare_xformers,
    ),
)
