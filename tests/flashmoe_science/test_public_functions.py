"""Every public function gives the same bits whatever torch's global settings are: defaults, modes, and every setter."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import flashmoe_science
from flashmoe_science import (
    DeviceError,
    InputError,
    MoE,
    attention_varlen,
    explain,
    flash_attention,
    fused_moe,
    limit_to_capacity,
    merge_attention,
    paged_append,
    routing_losses,
    sdpa,
    tokens_per_expert,
    topk_routing,
    topk_routing_with_losses,
)
from flashmoe_science.adapters import flash_attn
from flashmoe_science.quantized import dequantized, quantized
from flashmoe_science.varlen.append import slots_of
from flashmoe_science.varlen.transform import Rotary
from torch_settings import STATES, records, same_bits

CPU = torch.device("cpu")
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, PAGES, PAGE_SIZE = 4, 2, 32, 16, 9, 16

NO_TENSORS = {
    **dict.fromkeys(("BuildError", "DeviceError", "InputError"), "errors"),
    **dict.fromkeys(("report", "reset_report"), "counts of calls"),
    **dict.fromkeys(("enable_sdpa", "disable_sdpa"), "as sdpa, without its end"),
    "register_flash_attention_impl": "tests/flashmoe_science/takeover/test_implementation.py",
    "accelerate": "tests/flashmoe_science/huggingface: it sets what a model calls",
    "routing_losses": "part of topk_routing_with_losses",
}
"""Public names without a call of their own here, and why."""


class Given:
    """Arguments, the same for each call."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self.query = self.normal(24, HEADS, HEAD_DIM)
        self.key, self.value = self.normal(44, KV_HEADS, HEAD_DIM), self.normal(44, KV_HEADS, VALUE_DIM)
        self.key_pages = self.normal(PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM)
        self.value_pages = self.normal(PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM)
        self.sinks = self.normal(HEADS, dtype=torch.float32)
        self.lse = self.normal(24, HEADS, dtype=torch.float32)
        order = torch.randperm(PAGES, generator=self._generator, dtype=torch.int32, device=CPU)
        self.table = order.view(3, 3)
        self.used = integers(10, 1, 33)
        self.bounds: dict[str, Any] = {
            "cu_seqlens_q": integers(0, 3, 4, 24),
            "max_seqlen_q": 20,
            "max_seqlen_k": 48,
        }
        self.packed: dict[str, Any] = {**self.bounds, "cu_seqlens_k": integers(0, 10, 11, 44)}
        self.paged: dict[str, Any] = {**self.bounds, "block_table": self.table, "seqused_k": self.used}
        self.hidden_states = self.normal(6, 64)
        self.w13, self.w2 = self.normal(4, 128, 64), self.normal(4, 64, 64)
        self.logits = self.normal(6, 4, dtype=torch.float32)
        self.routing = topk_routing(self.logits, 2)
        self.new_key, self.new_value = self.normal(2, 4, KV_HEADS, HEAD_DIM), self.normal(2, 4, KV_HEADS, 32)
        self.cos_sin = self.normal(40, HEAD_DIM, dtype=torch.float32)
        self.norm = self.normal(HEAD_DIM)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.module = MoE(
                *(64, 64, 4, 2),
                correction_bias=True,
                bias=True,
                router_bias=True,
                shared_experts=1,
                capacity_factor=1.0,
                device="cpu",
                dtype=BF16,
            )

    def normal(self, *sizes: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        made = torch.randn(*sizes, generator=self._generator, dtype=torch.float32, device=CPU)
        return made.to(dtype)

    def dense(self) -> tuple[torch.Tensor, ...]:
        """(batch, heads, seqlen, head_dim)."""
        keys = PAGES * PAGE_SIZE
        shape = 1, keys, KV_HEADS, HEAD_DIM
        made = self.query[None], self.key_pages.view(shape), self.value_pages.view(shape)
        return tuple(tensor.transpose(1, 2) for tensor in made)


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=CPU)


def zeros(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(sizes, dtype=torch.float32, device=CPU).to(dtype)


def appended(given: Given, cache: torch.dtype, *, chosen: bool = False, composed: bool = False) -> list[Any]:
    """Rows normed, rotated and written into a cache of that type, with scales that are chosen on the way or none."""
    key, value, query = given.key[:5], given.value[:5], given.query[:5]
    if composed:  # rows whose last dimension is not contiguous are no kernel's
        key = key.transpose(1, 2).contiguous().transpose(1, 2)
    caches = [zeros(4, 8, KV_HEADS, size, dtype=cache) for size in (HEAD_DIM, VALUE_DIM)]
    scales = [zeros(4, 8, KV_HEADS, dtype=torch.float32) for _ in caches] if chosen else [None, None]
    result = paged_append(
        *(key, value, *caches, integers(3, -1, 17, 30, 0)),
        key_scale=scales[0],
        value_scale=scales[1],
        query=query,
        rotary=Rotary(given.cos_sin, integers(3, 5, 7, 1, 0)),
        query_norm=given.norm,
        key_norm=given.norm,
    )
    return [result, *caches, *(scale for scale in scales if scale is not None)]


def mixed(given: Given, bits: int) -> list[torch.Tensor]:
    (w13, w13_scales), (w2, w2_scales) = (
        quantized(weights, bits=bits, group=32) for weights in (given.w13, given.w2)
    )
    out = fused_moe(given.hidden_states, w13, w2, *given.routing, w13_scales=w13_scales, w2_scales=w2_scales)
    return [out, dequantized(w13, w13_scales), dequantized(w2, w2_scales, BF16)]


def gradients(given: Given) -> list[torch.Tensor]:
    """Of experts, and of a router."""
    weights, ids = given.routing
    leaves = [
        tensor.detach().requires_grad_() for tensor in (given.hidden_states, given.w13, given.w2, weights)
    ]
    out = fused_moe(*leaves, ids)
    logits = given.logits.detach().requires_grad_()
    chosen, _, losses = topk_routing_with_losses(logits, 2)
    of_router = chosen.square().sum() + losses.load_balancing + losses.z
    return [
        *torch.autograd.grad(out, leaves, torch.ones_like(out)),
        *torch.autograd.grad(of_router, logits),
    ]


def routed(given: Given) -> list[torch.Tensor]:
    weights, ids, losses = topk_routing_with_losses(given.logits, 2)
    grouped = topk_routing(
        given.logits, 2, scores="sigmoid", groups=2, top_groups=1, correction_bias=given.sinks
    )
    return [weights, ids, *losses, *grouped, limit_to_capacity(ids, 4, 1), tokens_per_expert(ids, 4)]


def through_module(given: Given) -> list[torch.Tensor]:
    out, losses = given.module.forward_with_losses(given.hidden_states)
    return [each.detach() for each in (given.module(given.hidden_states), out, *losses)]


def taken_over(given: Given) -> list[torch.Tensor]:
    with sdpa():
        return [functional.scaled_dot_product_attention(*given.dense(), enable_gqa=True)]


def with_cache(given: Given) -> list[torch.Tensor]:
    key, value = given.key_pages.clone(), given.value_pages.clone()
    new = given.new_key.flatten(0, 1)[:7], given.new_value.flatten(0, 1)[:7]
    out, lse = flash_attn.flash_attn_with_kvcache(
        *(given.query, key, value, *new),
        cache_seqlens=integers(3, 4, 5),
        page_table=given.table,
        cu_seqlens_q=given.bounds["cu_seqlens_q"],
        cu_seqlens_k_new=integers(0, 2, 4, 7),
        max_seqlen_q=20,
        causal=True,
        return_softmax_lse=True,
    )
    dense = [pages.view(3, 48, KV_HEADS, HEAD_DIM).clone()[:2] for pages in (key, value)]
    queries = given.query.view(2, 12, HEADS, HEAD_DIM)
    plain = flash_attn.flash_attn_with_kvcache(
        queries, *dense, given.new_key, given.new_value, cache_seqlens=7, causal=True
    )
    return [out, lse, key, value, *dense, plain]


CALLS: dict[str, Callable[[Given], Any]] = {
    "attention_varlen": lambda given: attention_varlen(
        *(given.query, given.key, given.value),
        **given.packed,
        return_lse=True,
        sinks=given.sinks,
        window=(5, 0),
        softcap=3.0,
    ),
    "attention_varlen, slopes": lambda given: attention_varlen(
        *(given.query.float(), given.key.float(), given.value.float()),
        **given.packed,
        return_lse=True,
        alibi_slopes=given.sinks.abs(),
    ),
    "attention_varlen, chunks": lambda given: attention_varlen(
        given.query, given.key, given.value, **given.packed, return_lse=True, chunk=8, split_keys=128
    ),
    "attention_varlen, pages": lambda given: attention_varlen(
        given.query, given.key_pages, given.value_pages, **given.paged, return_lse=True
    ),
    "attention_varlen, FP8": lambda given: attention_varlen(
        given.query, given.key_pages.to(FP8), given.value_pages.to(FP8), **given.paged, return_lse=True
    ),
    "attention_varlen, scales": lambda given: attention_varlen(
        *(given.query, given.key_pages.to(FP8), given.value_pages.to(FP8)),
        **given.paged,
        return_lse=True,
        key_scale=given.sinks[:KV_HEADS].abs(),
        value_scale=given.sinks[0].abs(),
    ),
    "flash_attention, window": lambda given: flash_attention(
        *given.dense(), causal=True, window=(6, 0), softcap=2.0, sinks=given.sinks, return_lse=True
    ),
    "explain": lambda given: [str(explain(flash_attention, *given.dense())).encode()],
    "merge_attention": lambda given: merge_attention(
        [given.query, given.query * 2], [given.lse, given.lse + 1], sinks=given.sinks
    ),
    "paged_append": lambda given: appended(given, BF16),
    "paged_append, FP8": lambda given: appended(given, FP8),
    "paged_append, chosen scales": lambda given: appended(given, FP8, chosen=True),
    "paged_append, composed": lambda given: appended(given, BF16, composed=True),
    "slots_of": lambda given: [
        slots_of(given.table, PAGE_SIZE, integers(0, 1, 2).long(), integers(0, 20, 47).long())
    ],
    "fused_moe, 8 bits": lambda given: mixed(given, 8),
    "fused_moe, 4 bits": lambda given: mixed(given, 4),
    "fused_moe, gradients": gradients,
    "topk_routing, topk_routing_with_losses, limit_to_capacity, tokens_per_expert": routed,
    "MoE": through_module,
    "sdpa": taken_over,
    "flash_attn_func": lambda given: flash_attn.flash_attn_func(
        *(tensor.transpose(1, 2) for tensor in given.dense()),
        causal=True,
        return_attn_probs=True,
        sinks=given.sinks.to(BF16),
        window_size=(3, 0),
    ),
    "flash_attn_varlen_func": lambda given: flash_attn.flash_attn_varlen_func(
        *(given.query, given.key, given.value),
        *(given.packed["cu_seqlens_q"], given.packed["cu_seqlens_k"], 20, 48),
        causal=True,
        return_attn_probs=True,
    ),
    "flash_attn_with_kvcache": with_cache,
}
"""Those of dense attention and experts of one type are in tests/test_global_settings.py."""

CASTS = ("window", "fused_moe", "MoE", "sdpa", "flash_attn_func")
"""Calls that follow autocast, as PyTorch's own do: tests/flashmoe_science/operators/test_autocast.py."""


@functools.cache
def _given() -> Given:
    return Given()


@functools.cache
def _plainly(name: str) -> Any:
    return CALLS[name](_given())


def test_every_public_name_is_called() -> None:
    called = {word for name in CALLS for word in name.replace(",", " ").split()}
    assert set(flashmoe_science.__all__) - called - set(NO_TENSORS) == set()
    assert set(flash_attn.__all__) - called == set()


@pytest.mark.parametrize("state", STATES)
def test_the_same_bits(state: str) -> None:
    given = _given()
    for name, call in CALLS.items():
        if "autocast(" in state and any(word in name for word in CASTS):
            continue
        plain = _plainly(name)
        with STATES[state]():
            if "gradients" in name and not records():
                continue
            here = call(given)
        if isinstance(plain[0], bytes):
            assert here == plain, name
        else:
            assert same_bits(plain, here), name


def _with_arguments() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Functions and arguments by their names: each tensor among them is put in another form."""
    given = _given()
    weights, ids = given.routing
    return {
        "attention_varlen": (
            attention_varlen,
            {"query": given.query, "key": given.key, "value": given.value, **given.packed},
        ),
        "attention_varlen, pages": (
            attention_varlen,
            {"query": given.query, "key": given.key_pages, "value": given.value_pages, **given.paged},
        ),
        "paged_append": (
            paged_append,
            {
                "key": given.key[:5],
                "value": given.value[:5],
                "key_cache": zeros(4, 8, KV_HEADS, HEAD_DIM, dtype=BF16),
                "value_cache": zeros(4, 8, KV_HEADS, VALUE_DIM, dtype=BF16),
                "slot_mapping": integers(3, -1, 17, 30, 0),
                "query": given.query[:5],
                "query_norm": given.norm,
                "key_norm": given.norm,
            },
        ),
        "merge_attention": (
            lambda out, lse, sinks: merge_attention([out, given.query], [lse, given.lse], sinks=sinks),
            {"out": given.query, "lse": given.lse, "sinks": given.sinks},
        ),
        "routing_losses": (routing_losses, {"logits": given.logits, "topk_ids": ids}),
        "topk_routing_with_losses": (
            lambda logits: topk_routing_with_losses(logits, 2),
            {"logits": given.logits},
        ),
        "limit_to_capacity": (lambda ids: limit_to_capacity(ids, 4, 1), {"ids": ids}),
        "tokens_per_expert": (lambda ids: tokens_per_expert(ids, 4), {"ids": ids}),
        "quantized": (lambda weights: quantized(weights, bits=8, group=32), {"weights": given.w13}),
        "fused_moe": (
            fused_moe,
            {
                "hidden_states": given.hidden_states,
                "w13": given.w13,
                "w2": given.w2,
                "topk_weights": weights,
                "topk_ids": ids,
            },
        ),
    }


WITH_ARGUMENTS = (
    "attention_varlen",
    "attention_varlen, pages",
    "paged_append",
    "merge_attention",
    "routing_losses",
    "topk_routing_with_losses",
    "limit_to_capacity",
    "tokens_per_expert",
    "quantized",
    "fused_moe",
)
"""Of `_with_arguments`, which calls a kernel and so is not asked while tests are collected."""

OPTIONAL = (
    "query_norm",
    "query of paged_append",
    "key_norm",
    "sinks",
    "cu_seqlens_k",
    "block_table",
    "seqused_k",
)

STRANGE: dict[str, Callable[[torch.Tensor], object]] = {
    "nested": lambda tensor: torch.nested.nested_tensor(list(tensor.unbind(0))),
    "jagged": lambda tensor: torch.nested.nested_tensor(list(tensor.unbind(0)), layout=torch.jagged),
    "sparse": lambda tensor: tensor.to_sparse(),
    "complex": lambda tensor: tensor.to(torch.complex64),
    "no tensor": lambda tensor: 3,
    "a list": lambda tensor: [1],
    "None": lambda tensor: None,
    "a scalar": lambda tensor: tensor.flatten()[0],
    "on another device": lambda tensor: tensor.to("meta"),
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("name", WITH_ARGUMENTS)
def test_what_is_no_such_tensor_is_refused_in_one_line(name: str, kind: str) -> None:
    """Behind a call with plain ones: PyTorch's check of what is like the last ends the process on nested tensors."""
    function, arguments = _with_arguments()[name]
    function(**arguments)
    for argument, tensor in arguments.items():
        if not isinstance(tensor, torch.Tensor) or (kind in ("nested", "jagged") and tensor.dim() < 2):
            continue
        one_tensor = sum(isinstance(each, torch.Tensor) for each in arguments.values()) == 1
        if (kind == "None" and {argument, f"{argument} of {name}"} & set(OPTIONAL)) or (
            kind == "on another device" and one_tensor
        ):
            continue
        with pytest.raises((InputError, DeviceError)) as raised:
            function(**{**arguments, argument: STRANGE[kind](tensor)})
        assert "\n" not in str(raised.value), (argument, raised.value)
        assert len(str(raised.value)) < 400


def test_all_that_have_arguments_are_tried() -> None:
    assert tuple(_with_arguments()) == WITH_ARGUMENTS


@pytest.mark.parametrize("count", [None, "x", -1, 1.5, True, 1 << 70, float("nan")])
def test_counts_of_experts_are_whole_numbers(count: Any) -> None:
    _, ids = _given().routing
    for call in (
        lambda: tokens_per_expert(ids, count),
        lambda: limit_to_capacity(ids, count, 1),
        lambda: limit_to_capacity(ids, 4, count),
    ):
        with pytest.raises(InputError, match="expected 0 or more, a whole number"):
            call()
