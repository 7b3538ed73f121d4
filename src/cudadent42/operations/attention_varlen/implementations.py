"""Who computes attention over a batch of sequences. Nothing is imported before it is asked for."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from cudadent42.model.implementations import Call, Implementation, Planned, UnsupportedCaseError
from cudadent42.operations.attention_varlen.case import VarlenCase
from cudadent42.operations.attention_varlen.cudnn import prepare_cudnn
from cudadent42.operations.attention_varlen.flex import prepare_flex
from cudadent42.operations.peers import needs

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cudadent42.operations.attention_varlen.inputs import VarlenInputs


def prepare_sdpa(case: VarlenCase, inputs: VarlenInputs) -> Call:
    """PyTorch's SDPA, a call for each sequence, whose keys are gathered from their pages in the call.

    Where the cache is in FP8, it reads the same keys in 16 bits. With sinks a sequence has a key of zeros more, whose
    score is what the mask adds to it, and whose value is zero. With ALiBi the mask adds that to each score, in the
    case's dtype, which is what SDPA takes. With a soft cap, which SDPA has not, operations of PyTorch stand in its
    place.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from cudadent42.operations.attention_varlen.capped import capped_attention
    from cudadent42.operations.attention_varlen.tree_masks import hidden_by_tree

    sdpa = partial(capped_attention, softcap=case.softcap) if case.softcap else scaled_dot_product_attention
    query, device = inputs.query, inputs.query.device
    starts_q = [0, *itertools.accumulate(case.seqlens_q)]
    starts_k = [0, *itertools.accumulate(case.seqlens_k)]
    left, right = case.sides
    paged = inputs.block_table is not None
    slopes, result_shape = inputs.alibi_slopes, inputs.result_like.shape

    def options_of(index: int, queries: int, keys: int) -> dict[str, Any]:
        has_tree = inputs.tree_mask is not None and bool(case.words(index))
        if left < 0 and not has_tree and inputs.sinks is None and slopes is None:
            if right < 0 or queries == 1:
                return {}
            if queries == keys:
                return {"is_causal": True}
        position = torch.arange(queries, dtype=torch.int64, device=device)[:, None] + keys - queries
        column = torch.arange(keys, dtype=torch.int64, device=device)
        seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
        if left >= 0:
            seen &= column >= position - left
        if right >= 0:
            seen &= column <= position + right
        if has_tree and inputs.tree_mask is not None:
            seen &= ~hidden_by_tree(inputs.tree_mask[slice(*starts_q[index : index + 2])], queries, keys)
        if inputs.sinks is None and slopes is None:
            return {"attn_mask": seen}
        added = torch.zeros(case.num_heads, queries, keys, dtype=query.dtype, device=device)
        if slopes is not None:
            added -= (slopes[:, None, None] * (position - column).abs()).to(query.dtype)
        added.masked_fill_(~seen, -torch.inf)
        if inputs.sinks is not None:
            sinks = inputs.sinks[:, None, None].to(query.dtype)
            added = torch.cat((added, sinks.expand(-1, queries, -1)), -1)
        return {"attn_mask": added[None]}

    sequences = [
        (
            slice(*starts_q[index : index + 2]),
            inputs.slots[slice(*starts_k[index : index + 2])]
            if paged
            else slice(*starts_k[index : index + 2]),
            options_of(index, queries, keys),
            max(0, queries - keys) if right >= 0 or case.words(index) else 0,
        )
        for index, (queries, keys) in enumerate(zip(case.seqlens_q, case.seqlens_k, strict=True))
        if queries and keys
    ]

    def rows_of(cache: Tensor, keys: Any) -> Tensor:
        rows = cache[keys]
        if inputs.sinks is not None:
            rows = torch.cat((rows, rows.new_zeros(1, *rows.shape[1:])))
        return rows.transpose(0, 1)[None]

    def call() -> Tensor:
        key_rows, value_rows = inputs.rows_of_keys
        output = query.new_zeros(result_shape)
        for rows, keys, options, empty in sequences:
            result = sdpa(
                query[rows].transpose(0, 1)[None],
                rows_of(key_rows, keys),
                rows_of(value_rows, keys),
                enable_gqa=case.num_heads != case.num_kv_heads,
                **options,
            )[0].transpose(0, 1)
            # Rows that see no key: zeros, whatever SDPA makes of them.
            output[rows.start + empty : rows.stop] = result[empty:]
        return output

    return call


def _prepare_ours(case: VarlenCase, inputs: VarlenInputs) -> Call:
    attention = importlib.import_module("flashmoe_science").attention_varlen
    return partial(attention, inputs.query, inputs.key, inputs.value, **arguments(case, inputs))


def _prepare_wide(case: VarlenCase, inputs: VarlenInputs) -> Call:
    """Ours over the same keys in 16 bits: what FP8 has to gain on."""
    if inputs.wide_key is None or inputs.wide_value is None:
        raise UnsupportedCaseError("the cache is in 16 bits already")
    wide = replace(
        inputs,
        key=inputs.wide_key,
        value=inputs.wide_value,
        key_scale=None,
        value_scale=None,
        wide_key=None,
        wide_value=None,
    )
    return _prepare_ours(case, wide)


def arguments(case: VarlenCase, inputs: VarlenInputs) -> dict[str, Any]:
    """What `flashmoe_science.attention_varlen` is called with, besides query, key and value."""
    lengths: dict[str, Any] = {"cu_seqlens_k": inputs.cu_seqlens_k}
    if inputs.block_table is not None:
        lengths = {"block_table": inputs.block_table, "seqused_k": inputs.seqused_k}
    given = {
        "key_scale": inputs.key_scale,
        "value_scale": inputs.value_scale,
        "tree_mask": inputs.tree_mask,
        "sinks": inputs.sinks,
        "alibi_slopes": inputs.alibi_slopes,
    }
    more = {name: tensor for name, tensor in given.items() if tensor is not None}
    return {
        "cu_seqlens_q": inputs.cu_seqlens_q,
        "max_seqlen_q": max(case.seqlens_q),
        "max_seqlen_k": max(case.seqlens_k),
        "causal": case.causal,
        "window": (case.window, -1),
        **({"softcap": case.softcap} if case.softcap else {}),
        **lengths,
        **more,
    }


# ---------------------------------------------------------------- peers, never a dependency


def _prepare_flash_attn_3(case: VarlenCase, inputs: VarlenInputs) -> Call:
    module = importlib.import_module("flash_attn_interface")
    query, key, value = inputs.tensors
    if case.tree:
        raise UnsupportedCaseError("FlashAttention-3 takes no trees")
    if case.alibi:
        raise UnsupportedCaseError("FlashAttention-3 takes no ALiBi slopes")
    if case.fp8_scales:
        raise UnsupportedCaseError(
            "FlashAttention-3 rounds queries and weights to FP8, too, which is beyond the bounds for 16-bit queries"
        )
    if case.sinks and inputs.block_table is None:
        raise UnsupportedCaseError("FlashAttention-3 is asked for sinks over pages alone")
    common: dict[str, Any] = {
        "max_seqlen_q": max(case.seqlens_q),
        "cu_seqlens_q": inputs.cu_seqlens_q,
        "causal": case.causal,
        "window_size": case.sides,
        "softcap": case.softcap,
    }
    if inputs.block_table is None:
        function = partial(
            module.flash_attn_varlen_func,
            *(query, key, value),
            cu_seqlens_k=inputs.cu_seqlens_k,
            max_seqlen_k=max(case.seqlens_k),
            **common,
        )
    else:
        if inputs.sinks is not None:
            common["sinks"] = inputs.sinks.to(query.dtype)
        # Behind a sequence's length its table is not read; its own kernels want numbers of pages there all the same.
        function = partial(
            module.flash_attn_with_kvcache,
            *(query, key, value),
            cache_seqlens=inputs.seqused_k,
            page_table=inputs.block_table.clamp(min=0),
            **common,
        )

    def call() -> Tensor:
        result = function()
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output

    _require_support(function)
    return call


def _require_support(function: Callable[[], object]) -> None:
    """Builds of FlashAttention-3 leave parts out, such as soft caps, and say so when they are called for them."""
    try:
        function()
    except RuntimeError as error:
        refusal = next((line for line in str(error).splitlines() if "does not support" in line), None)
        if refusal is None:
            raise
        # The function and the line of C++ that refuse stand before the sentence.
        sentence = re.sub(r".*\.\w+:\d+,", "", refusal).strip().rstrip(".")
        raise UnsupportedCaseError(f"FlashAttention-3: {sentence[:200]}") from error


_WORKSPACE_BYTES = 256 << 20
_MOST_DECODED = 8
"""Queries of each sequence, as many of each, that go to FlashInfer's wrapper for decode steps."""


@cache
def _flashinfer_workspace(device: torch.device) -> Tensor:
    """Of all its calls on a device, which run one after another."""
    import torch

    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _prepare_flashinfer(case: VarlenCase, inputs: VarlenInputs) -> Call:
    """The wrapper for decode steps over pages, where they are that, or the one for prompts over pages or packed keys.

    Planning, which reads lengths on the host, is a step's.
    """
    import torch

    flashinfer = importlib.import_module("flashinfer")
    if case.sinks:
        raise UnsupportedCaseError("flashinfer is not asked for sinks")
    if case.fp8_scales not in ("", "all"):
        raise UnsupportedCaseError("flashinfer takes one scale for a whole tensor")
    if case.alibi:
        raise UnsupportedCaseError("flashinfer takes no ALiBi slopes: it has its own")
    if not all(case.seqlens_k) or not all(case.seqlens_q):
        raise UnsupportedCaseError("flashinfer takes no empty sequences")
    query, key, value = inputs.tensors
    workspace = _flashinfer_workspace(query.device)
    options: dict[str, Any] = {
        "causal": case.causal,
        "window_left": case.window,
        "q_data_type": query.dtype,
        "kv_data_type": key.dtype,
        "logits_soft_cap": case.softcap,
    }
    if case.tree:  # takes the place of causal; a bool for each query and key of all sequences
        options["custom_mask"] = _seen(case, inputs)
    if case.value_dim:  # of the wrappers for prompts alone
        options["head_dim_vo"] = case.value_dim
    heads = case.num_heads, case.num_kv_heads, case.head_dim
    scales = _scales(inputs)
    if inputs.block_table is None:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        plan = partial(wrapper.plan, inputs.cu_seqlens_q, inputs.cu_seqlens_k, *heads, **options)
        plan()
        return Planned(partial(wrapper.run, query, key, value, **scales), plan)
    pages = (
        torch.tensor([0, *itertools.accumulate(case.pages)], dtype=torch.int32, device=query.device),
        inputs.block_table[inputs.block_table >= 0],
        (inputs.seqused_k - 1) % case.page_size + 1,
    )
    if _is_decode_step(case):
        # On tensor cores, as several query heads share a key head.
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        del options["causal"]  # follows from the number of queries
        options["q_len_per_req"] = case.seqlens_q[0]
        plan = partial(wrapper.plan, *pages, *heads, case.page_size, **options)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        plan = partial(wrapper.plan, inputs.cu_seqlens_q, *pages, *heads, case.page_size, **options)
    plan()
    return Planned(partial(wrapper.run, query, (key, value), **scales), plan)


def _scales(inputs: VarlenInputs) -> dict[str, float]:
    """Of a cache in FP8. FlashInfer wants numbers, and to read them from the GPU in each call would wait for it."""
    tensors = {"k_scale": inputs.key_scale, "v_scale": inputs.value_scale}
    return {name: float(scale) for name, scale in tensors.items() if scale is not None}


def _is_decode_step(case: VarlenCase) -> bool:
    """Whether FlashInfer's wrapper for decode steps takes it."""
    queries = case.seqlens_q[0]
    return (
        case.causal
        and not case.tree
        and not case.value_dim
        and len(set(case.seqlens_q)) == 1
        and queries <= min(_MOST_DECODED, *case.seqlens_k)
    )


def _seen(case: VarlenCase, inputs: VarlenInputs) -> Tensor:
    """Whether a query sees a key: of all sequences, queries and keys, in this order."""
    import torch

    from cudadent42.operations.attention_varlen.tree_masks import hidden_by_tree

    device, parts, token = inputs.query.device, [], 0
    for index, (queries, keys) in enumerate(zip(case.seqlens_q, case.seqlens_k, strict=True)):
        seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
        if case.causal:
            seen = seen.tril(keys - queries)
        if inputs.tree_mask is not None and case.words(index):
            seen &= ~hidden_by_tree(inputs.tree_mask[token : token + queries], queries, keys)
        parts.append(seen.flatten())
        token += queries
    return torch.cat(parts)


_BOTH = ("cpu", "cuda")
_COMPILING_S = 120.0
"""torch.compile starts its processes once, which took over a minute."""


def _implementation(
    name: str, description: str, devices: tuple[str, ...], prepare: Any, **more: Any
) -> Implementation:
    return Implementation(
        name, description, devices, prepare, operation=VarlenCase.operation, strict=False, **more
    )


def _peer(name: str, module: str, package: str, description: str, prepare: Any) -> Implementation:
    return _implementation(name, description, ("cuda",), prepare, unavailable=needs(module, package))


ALL: tuple[Implementation, ...] = (
    _implementation("pytorch", "PyTorch SDPA, a call for each sequence", _BOTH, prepare_sdpa),
    Implementation(
        "cudadent42",
        "flashmoe_science.attention_varlen",
        _BOTH,
        _prepare_ours,
        operation=VarlenCase.operation,
    ),
    _implementation(
        "cudadent42_16bit",
        "flashmoe_science.attention_varlen over the same keys in 16 bits",
        _BOTH,
        _prepare_wide,
    ),
    _peer(
        "flash_attn_3", "flash_attn_interface", "tokenspeed-fa3", "FlashAttention-3", _prepare_flash_attn_3
    ),
    _peer(
        "flashinfer",
        "flashinfer",
        "flashinfer-python",
        "FlashInfer, planned once a step",
        _prepare_flashinfer,
    ),
    _peer("cudnn", "cudnn", "nvidia-cudnn-frontend", "cuDNN's attention over pages", prepare_cudnn),
    _implementation(
        "flex_attention",
        "PyTorch's flex_attention, compiled, its mask of blocks made once",
        ("cuda",),
        prepare_flex,
        compiling_s=_COMPILING_S,
    ),
)
