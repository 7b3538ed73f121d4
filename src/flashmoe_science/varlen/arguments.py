"""What attention over sequences of any lengths asks of its arguments. Checked once for each `Problem`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashmoe_science.arguments import DTYPES, HEAD_DIM_STEP, check_causal, check_flag, shown
from flashmoe_science.errors import InputError
from flashmoe_science.varlen.options import (
    check_chunk,
    check_softcap,
    check_softmax_scale,
    check_split,
    check_tree,
    check_window,
)
from flashmoe_science.varlen.problem import Problem, Quantized, Sizes, Strides

MAX_HEAD_DIM = 576
"""Multi-head latent attention: 512 of the latent and 64 that are rotated."""
MAX_VALUE_DIM = 512
FP8 = torch.float8_e4m3fn
_NEEDED = ("query", "key", "value", "cu_seqlens_q")
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table")


class Inputs(NamedTuple):
    """The tensors that a caller gave: see `attention.attention_varlen`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor | None
    block_table: torch.Tensor | None
    seqused_k: torch.Tensor | None
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    out: torch.Tensor | None
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None
    tree_mask: torch.Tensor | None = None


class Options(NamedTuple):
    """What else decides which problem it is."""

    causal: bool
    window: tuple[int, int]
    softcap: float
    softmax_scale: float | None
    split_keys: int | None
    return_lse: bool
    chunk: int = 0


def signature_of(inputs: Inputs, options: Options) -> tuple[object, ...]:
    """All that `check` looks at, and no number of tokens, sequences or pages.

    Raises AttributeError or RuntimeError for what is no dense tensor.
    """
    (
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        block_table,
        seqused_k,
        sinks,
        alibi_slopes,
        out,
        key_scale,
        value_scale,
        tree_mask,
    ) = inputs
    return (
        query.shape[1:],
        query.stride(),
        query.dtype,
        query.device,
        key.shape[1:],
        key.stride(),
        key.dtype,
        key.device,
        value.shape[1:],
        value.stride(),
        value.dtype,
        value.device,
        _vector(cu_seqlens_q),
        None if cu_seqlens_k is None else _vector(cu_seqlens_k),
        None if block_table is None else _vector(block_table),
        None if seqused_k is None else _vector(seqused_k),
        None if sinks is None else (_vector(sinks), sinks.shape),
        None if alibi_slopes is None else (_vector(alibi_slopes), alibi_slopes.shape[-1]),
        None if out is None else (out.shape[1:], out.stride(), out.dtype, out.device),
        None if key_scale is None else _scale(key_scale),
        None if value_scale is None else _scale(value_scale),
        None if tree_mask is None else _vector(tree_mask),
        options,
    )


def _scale(scale: torch.Tensor) -> tuple[object, ...]:
    return scale.shape[1:] if scale.dim() > 1 else scale.shape, scale.stride(), scale.dtype, scale.device


def check(inputs: Inputs, options: Options) -> Problem:
    """The problem that these arguments are; InputError, with what to do, unless they make sense together.

    Numbers of sequences, tokens and pages are not looked at: see `check_sizes`.
    """
    (
        query,
        key,
        value,
        _,
        cu_seqlens_k,
        block_table,
        seqused_k,
        sinks,
        alibi_slopes,
        out,
        *scales,
        tree_mask,
    ) = inputs
    for name, tensor in inputs._asdict().items():
        if tensor is not None or name in _NEEDED:
            _check_tensor(name, tensor, query)
    paged = block_table is not None
    _check_form(key, cu_seqlens_k, block_table, seqused_k)
    _check_query_key_value(query, key, value, paged)
    for name in _LENGTHS:
        _check_lengths(name, getattr(inputs, name))
    _, num_heads, head_dim = query.shape
    num_kv_heads, value_dim = value.shape[-2:]
    if sinks is not None:
        check_per_head("sinks", sinks, num_heads, sequences=False)
    if alibi_slopes is not None:
        check_per_head("alibi_slopes", alibi_slopes, num_heads, sequences=True)
    if out is not None:
        check_out(out, query, value)
    left, right = check_window(options.window)
    if tree_mask is not None:
        check_tree(
            tree_mask,
            query.shape[0],
            {
                "window": options.window[0] != -1,
                "chunk": check_chunk(options.chunk) > 0,
                "alibi_slopes": alibi_slopes is not None,
            },
        )
    return Problem(
        dtype=query.dtype,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        page_size=key.shape[1] if paged else 0,
        query_strides=_row_strides(query),
        key_strides=_key_strides(key),
        value_strides=_key_strides(value),
        output_strides=(num_heads * value_dim, value_dim) if out is None else _row_strides(out),
        window_left=left,
        window_right=0 if check_causal(options.causal) else right,
        softmax_scale=check_softmax_scale(options.softmax_scale, head_dim),
        softcap=check_softcap(options.softcap),
        sinks=sinks is not None,
        alibi=alibi_slopes is not None,
        used_keys=seqused_k is not None,
        split_keys=check_split(options.split_keys),
        return_lse=check_flag("return_lse", options.return_lse),
        quantized=_quantized(key, *scales),
        chunk=check_chunk(options.chunk),
        tree=tree_mask is not None,
    )


def check_sizes(inputs: Inputs, max_seqlen_q: int, max_seqlen_k: int) -> Sizes:
    """What the host knows of lengths; InputError unless all tensors speak of the same. Part of every call."""
    query, key, value, cu_seqlens_q, cu_seqlens_k, block_table, seqused_k, _, alibi_slopes, out, *more = (
        inputs
    )
    *scales, tree_mask = more
    batch = cu_seqlens_q.shape[0] - 1
    if (
        batch < 0
        or (cu_seqlens_k is not None and cu_seqlens_k.shape[0] != batch + 1)
        or (block_table is not None and block_table.shape[0] != batch)
        or (seqused_k is not None and seqused_k.shape[0] != batch)
        or (alibi_slopes is not None and alibi_slopes.dim() == 2 and alibi_slopes.shape[0] != batch)
        or key.shape[0] != value.shape[0]
        or (out is not None and out.shape[0] != query.shape[0])
        or (tree_mask is not None and tree_mask.shape[0] != query.shape[0])
        or any(scale is not None and scale.dim() > 1 and scale.shape[0] != key.shape[0] for scale in scales)
        or type(max_seqlen_q) is not int
        or type(max_seqlen_k) is not int
        or max_seqlen_q < 0
        or max_seqlen_k < 0
    ):
        _refuse_sizes(inputs, max_seqlen_q, max_seqlen_k)
    return Sizes(batch, max_seqlen_q, max_seqlen_k)


def _refuse_sizes(inputs: Inputs, max_seqlen_q: int, max_seqlen_k: int) -> None:
    for name, bound in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if type(bound) is not int or bound < 0:
            raise InputError(
                f"{name} is {shown(bound)}; expected an int of at least 0 that no sequence's length exceeds"
            )
    batch = inputs.cu_seqlens_q.shape[0] - 1
    if batch < 0:
        raise InputError("cu_seqlens_q is empty; expected (batch + 1) entries, the first of them 0")
    tokens, keys = inputs.query.shape[0], inputs.key.shape[0]
    for scale in ("key_scale", "value_scale"):
        tensor = getattr(inputs, scale)
        if tensor is not None and tensor.dim() > 1 and tensor.shape[0] != keys:
            raise InputError(
                f"{scale} has shape {tuple(tensor.shape)}, but key has {keys}; expected {keys} as its first dimension"
            )
    for name, first, counted, expected in (
        ("value", keys, "key has", keys),
        ("out", tokens, "query has", tokens),
        ("tree_mask", tokens, "query has", tokens),
        ("cu_seqlens_k", batch + 1, "cu_seqlens_q has", batch + 1),
        ("block_table", batch, "sequences of cu_seqlens_q are", batch),
        ("seqused_k", batch, "sequences of cu_seqlens_q are", batch),
        ("alibi_slopes", batch, "sequences of cu_seqlens_q are", batch),
    ):
        tensor = getattr(inputs, name)
        if tensor is not None and tensor.shape[0] != expected:
            raise InputError(
                f"{name} has shape {tuple(tensor.shape)}, but {counted} {first}; expected {expected} as its first "
                "dimension"
            )


def _vector(tensor: torch.Tensor) -> tuple[object, ...]:
    """What decides whether lengths or numbers for each head can be read."""
    return (
        tensor.dtype,
        tensor.device,
        tensor.dim(),
        tensor.stride(-1) if tensor.shape[-1] > 1 else 1,
    )


def _check_tensor(name: str, tensor: object, query: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise InputError(f"{name} is a {type(tensor).__name__}; expected a torch.Tensor")
    if tensor.is_nested:
        raise InputError(f"{name} is a nested tensor; expected a packed one: take its values()")
    if tensor.layout is not torch.strided:
        raise InputError(f"{name} has layout {tensor.layout}; expected a dense tensor: call .to_dense()")
    if tensor.device != query.device:
        raise InputError(
            f"{name} is on {tensor.device} but query is on {query.device}; expected one device: move it with .to()"
        )


def _check_form(
    key: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
) -> None:
    """Either packed or in pages."""
    if block_table is None and cu_seqlens_k is None:
        raise InputError(
            "neither cu_seqlens_k nor block_table is given; expected cu_seqlens_k for packed keys, "
            "block_table and seqused_k for keys in pages"
        )
    if block_table is not None and cu_seqlens_k is not None:
        raise InputError("cu_seqlens_k and block_table are both given; expected one: packed keys or pages")
    if block_table is not None and seqused_k is None:
        raise InputError(
            "block_table is given without seqused_k; expected the number of keys of each sequence"
        )
    if block_table is not None and key.dim() == 4 and key.shape[1] == 0:
        raise InputError("pages of key hold 0 tokens; expected at least one")


def _check_query_key_value(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, paged: bool) -> None:
    packed_shape, paged_shape = "(keys, kv_heads, {})", "(pages, page_size, kv_heads, {})"
    like = paged_shape if paged else packed_shape
    expectations = (
        ("query", query, "(tokens, heads, head_dim)", 3),
        ("key", key, like.format("head_dim"), 4 if paged else 3),
        ("value", value, like.format("value_dim"), 4 if paged else 3),
    )
    for name, tensor, shape, dimensions in expectations:
        if tensor.dim() != dimensions:
            raise InputError(f"{name} has shape {tuple(tensor.shape)}; expected {shape}")
        if name != "query" and tensor.dtype is FP8:
            if query.dtype not in (torch.bfloat16, torch.float16) or value.dtype is not key.dtype:
                raise InputError(
                    f"query is {query.dtype}, key {key.dtype} and value {value.dtype}; expected both caches in FP8, "
                    "and queries in bfloat16 or float16"
                )
        elif tensor.dtype not in DTYPES:
            expected = "float32, bfloat16 or float16" + (
                ", or float8_e4m3fn of a cache" if name != "query" else ""
            )
            raise InputError(f"{name} has dtype {tensor.dtype}; expected {expected}: use .to()")
        elif tensor.dtype != query.dtype:
            raise InputError(
                f"{name} is {tensor.dtype} but query is {query.dtype}; expected one dtype: convert with .to()"
            )
        if tensor.stride(-1) != 1:
            raise InputError(
                f"the last dimension of {name} is not contiguous (stride {tensor.stride(-1)}); "
                "call .contiguous() on it"
            )
    if key.shape[:-1] != value.shape[:-1]:
        raise InputError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} differ before their last dimension; "
            f"expected key {like.format('head_dim')} and value {like.format('value_dim')}"
        )
    heads, kv_heads = query.shape[1], key.shape[-2]
    if not kv_heads or heads % kv_heads:
        raise InputError(
            f"{heads} query heads cannot share {kv_heads} key/value heads; "
            "expected the first to be a multiple of the second"
        )
    if key.shape[-1] != query.shape[2]:
        raise InputError(
            f"query has head_dim {query.shape[2]} but key has {key.shape[-1]}; expected the same"
        )
    for name, dimension, most in (
        ("head_dim", query.shape[2], MAX_HEAD_DIM),
        ("value_dim", value.shape[-1], MAX_VALUE_DIM),
    ):
        if not HEAD_DIM_STEP <= dimension <= most or dimension % HEAD_DIM_STEP:
            raise InputError(
                f"{name} is {dimension}; expected a multiple of {HEAD_DIM_STEP} up to {most}: "
                + ("pad with zeros" if dimension < most else "compose the call of PyTorch's operations")
                + (", and give softmax_scale" if name == "head_dim" and dimension < most else "")
            )


def check_scale(name: str, scale: torch.Tensor | None, cache: torch.Tensor) -> None:
    """InputError unless it is None, or scales of this cache, which is one of FP8."""
    if scale is None:
        return
    if cache.dtype is not FP8:
        raise InputError(f"{name} is given with a cache of {cache.dtype}; expected it with {FP8} alone")
    if scale.dtype is not torch.float32:
        raise InputError(f"{name} has dtype {scale.dtype}; expected float32: use .float()")
    if scale.device != cache.device:
        raise InputError(f"{name} is on {scale.device} but its cache on {cache.device}; move it with .to()")
    heads = cache.shape[-2]
    if tuple(scale.shape) not in ((), (1,), (heads,)) and (
        scale.dim() != cache.dim() - 1 or tuple(scale.shape[1:]) != tuple(cache.shape[1:-1])
    ):
        raise InputError(
            f"{name} has shape {tuple(scale.shape)}; expected () for all, ({heads},) for each key/value head, or "
            f"{tuple(cache.shape[:-1])} for each key and head"
        )


def _quantized(
    key: torch.Tensor, key_scale: torch.Tensor | None, value_scale: torch.Tensor | None
) -> Quantized | None:
    check_scale("key_scale", key_scale, key)
    check_scale("value_scale", value_scale, key)
    if key.dtype is not FP8:
        return None
    return Quantized(
        *(None if scale is None else _scale_strides(scale) for scale in (key_scale, value_scale))
    )


def _scale_strides(scale: torch.Tensor) -> Strides:
    """Of (page, token, head)."""
    strides = scale.stride()
    if scale.dim() == 3:
        return strides[0], strides[1], strides[2]
    if scale.dim() == 2:
        return 0, strides[0], strides[1]
    return 0, 0, strides[0] if scale.numel() > 1 else 0


def _check_lengths(name: str, tensor: torch.Tensor | None) -> None:
    if tensor is None:
        return
    dimensions = 2 if name == "block_table" else 1
    if tensor.dim() != dimensions:
        shape = {"block_table": "(batch, pages)", "seqused_k": "(batch,)"}.get(name, "(batch + 1,)")
        raise InputError(f"{name} has shape {tuple(tensor.shape)}; expected {shape}")
    if tensor.dtype is not torch.int32:
        raise InputError(f"{name} has dtype {tensor.dtype}; expected int32: use .to(torch.int32)")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise InputError(f"the last dimension of {name} is not contiguous; call .contiguous() on it")


def check_per_head(name: str, tensor: torch.Tensor, heads: int, *, sequences: bool) -> None:
    """InputError unless it has a float32 for each head; with `sequences`, perhaps a row of them for each sequence."""
    if not (tensor.dim() == 1 or (sequences and tensor.dim() == 2)) or tensor.shape[-1] != heads:
        either = f" or (batch, {heads})" if sequences else ""
        raise InputError(
            f"{name} has shape {tuple(tensor.shape)}; expected ({heads},){either}, one for each head"
        )
    if tensor.dtype is not torch.float32:
        raise InputError(f"{name} has dtype {tensor.dtype}; expected float32: convert once with .float()")
    if heads > 1 and tensor.stride(-1) != 1:
        raise InputError(f"the last dimension of {name} is not contiguous; call .contiguous() on it")


def check_out(out: torch.Tensor, query: torch.Tensor, value: torch.Tensor) -> None:
    """InputError unless it can hold the result."""
    expected = (*query.shape[:-1], value.shape[-1])
    if out.dim() != 3 or tuple(out.shape[1:]) != expected[1:] or out.dtype != query.dtype:
        raise InputError(
            f"out is {out.dtype} with shape {tuple(out.shape)}; expected {query.dtype} with shape {expected}"
        )
    if out.stride(2) != 1:
        raise InputError("the last dimension of out is not contiguous; expected stride 1 there")
    if any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True)):
        raise InputError(
            f"out has strides {out.stride()}, so several rows lie in the same memory; expected memory for each: "
            "pass a tensor that was not expanded"
        )


def _row_strides(tensor: torch.Tensor) -> tuple[int, int]:
    """Of (token, head), the last two dimensions but one. That of a single head is never used: 0.

    How many tokens there are is not for a problem to know, so theirs is what it is.
    """
    token, head = tensor.stride()[-3:-1]
    return token, head if tensor.shape[-2] > 1 else 0


def _key_strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Of (page, token, head)."""
    token, head = _row_strides(tensor)
    if tensor.dim() == 3:
        return 0, token, head
    return tensor.stride(0), token if tensor.shape[1] > 1 else 0, head
