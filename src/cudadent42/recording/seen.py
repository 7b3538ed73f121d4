"""Where calls are seen: PyTorch's attention, transformers' attention and experts, and this project's own functions.

The functions themselves are replaced while a recorder is there. A dispatch mode would see compiled graphs no better,
and a function mode neither other threads nor a takeover; each would slow every other operation of the script.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.jit._builtins
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from cudadent42.recording import problems
from cudadent42.recording.problems import Problem
from cudadent42.recording.recorder import Recorder
from cudadent42.recording.records import Kind
from cudadent42.recording.replaced import after_import, replaced
from flashmoe_science.takeover.attention import as_autocast
from flashmoe_science.takeover.conditions import why_not_plain
from flashmoe_science.takeover.sdpa import is_causal_bias
from flashmoe_science.takeover.tracing import constant_result
from flashmoe_science.torch_private import flash_is_allowed
from flashmoe_science.varlen.dense import EVERYTHING

_BASELINES = {"grouped_mm": "grouped_mm", "cudadent42": "grouped_mm", "eager": "expert_loop"}
"""The lab's implementations by transformers' names of experts."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Of others it is not known where they lie."""
_SEEN_BELOW = (None, "sdpa", "cudadent42", "paged|sdpa")
"""Transformers' names of attention that come to PyTorch's function or to ours."""
_DENSE = {"window": EVERYTHING, "softcap": 0.0, "sinks": None}
"""Options of `flash_attention` as they are where a suite can have the call."""


@contextmanager
def seen_by(recorder: Recorder) -> Iterator[None]:
    """Inside, calls of attention and experts go through the recorder."""
    attention = importlib.import_module("flashmoe_science.attention").flash_attention
    moe = importlib.import_module("flashmoe_science.moe").fused_moe
    sdpa = functional.scaled_dot_product_attention
    replacing = _sdpa(recorder, sdpa)
    # torch.jit.script, which compiles what it finds there, is to find the operator.
    torch.jit._builtins._register_builtin(replacing, "aten::scaled_dot_product_attention")
    with ExitStack() as stack:
        # By its id, which another function may have after it.
        table = torch.jit._builtins._get_builtin_table()  # type: ignore[no-untyped-call]
        stack.callback(table.pop, id(replacing), None)
        stack.enter_context(
            replaced(
                {
                    sdpa: replacing,
                    attention: _flash_attention(recorder, attention),
                    moe: _fused_moe(recorder, moe),
                }
            )
        )
        stack.enter_context(
            after_import(
                {
                    "transformers.modeling_utils": functools.partial(
                        _see_interface, stack, "AttentionInterface", functools.partial(_layer, recorder)
                    ),
                    "transformers.integrations.moe": functools.partial(
                        _see_interface, stack, "ExpertsInterface", functools.partial(_experts, recorder)
                    ),
                }
            )
        )
        yield


# ---------------------------------------------------------------- PyTorch


def _sdpa(recorder: Recorder, previous: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    traced = _traced(recorder)

    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if is_dynamo_compiling():
            traced()
            return previous(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )

        def call() -> torch.Tensor:
            if attn_mask is not None and is_causal_bias(attn_mask) and previous is _ORIGINAL:
                # Its class knows PyTorch's function by the attribute that is replaced, so it is asked directly.
                bias: Any = attn_mask
                result: torch.Tensor = bias._dispatch(
                    query, key, value, bias, dropout_p, is_causal, scale, enable_gqa
                )
                return result
            return previous(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )

        if not recorder.active:
            return call()
        reason = why_not_plain(query, key, value)
        if reason is not None:
            return recorder.call(
                reason,
                lambda: problems.elsewhere(Kind.ATTENTION, "attention", query, reason),
                (query,)
                if isinstance(query, torch.Tensor)
                else (torch.empty(0, dtype=torch.float32, device="cpu"),),
                call,
            )
        variant = attn_mask.variant.name if is_causal_bias(attn_mask) else None  # type: ignore[union-attr]
        plain_mask = attn_mask if variant is None else None
        flash = flash_is_allowed()
        masks = (plain_mask,) if isinstance(plain_mask, torch.Tensor) else ()
        described = (
            *((mask.dtype, mask.shape) for mask in masks),
            *(type(plain_mask), variant, bool(dropout_p), is_causal, _number(scale), enable_gqa, flash),
        )

        def problem() -> Problem:
            # Values do not matter here; a cast says which dtype and strides the kernels would see.
            cast = as_autocast(query, key, value)
            return problems.attention(
                *cast,
                causal=is_causal or variant is not None,
                lower_right=variant == "LOWER_RIGHT",
                scale=scale,
                grouped=enable_gqa is True,
                mask=problems.mask_kind(masks[0]) if masks else None if plain_mask is None else "no mask",
                dropout_p=dropout_p,
                reason=None if flash else "torch.nn.attention.sdpa_kernel asks for others",
            )

        tensors = (query, key, value, *masks)
        return recorder.call(("sdpa", *_key(query, key, value), *described), problem, tensors, call)

    return scaled_dot_product_attention


_ORIGINAL = torch._C._nn.scaled_dot_product_attention


def _key(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[object, ...]:
    """What of the tensors makes a problem another one."""
    kind = query.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return (
        *(query.dtype, query.shape, query.stride(), kind, autocast),
        *(key.dtype, key.shape, key.stride(), value.shape, value.stride()),
    )


def _number(scale: object) -> object:
    """Nothing that a key would keep alive."""
    return scale if scale is None or isinstance(scale, (int, float)) else type(scale)


def _traced(recorder: Recorder) -> Callable[[], None]:
    @constant_result
    def traced() -> None:
        recorder.traced()

    return traced


# ---------------------------------------------------------------- this project


def _flash_attention(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    traced = _traced(recorder)

    @functools.wraps(original)
    def flash_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
        if is_dynamo_compiling():
            traced()
            return original(query, key, value, **options)

        def call() -> Any:
            return original(query, key, value, **options)

        if not recorder.active or why_not_plain(query, key, value) is not None:
            return call()
        causal, scale = options.get("causal", False), options.get("softmax_scale")
        reason = _why_more_than_dense(options)

        def problem() -> Problem:
            return problems.attention(
                *as_autocast(query, key, value),
                causal=causal,
                lower_right=True,
                scale=scale,
                grouped=True,
                reason=reason,
            )

        described = ("ours", *_key(query, key, value), causal, _number(scale), reason)
        return recorder.call(described, problem, (query, key, value), call, ours=True)

    return flash_attention


def _why_more_than_dense(options: Mapping[str, Any]) -> str | None:
    """Why a call of `flash_attention` with these is no case of a suite; None if it is."""
    unusual = [
        name
        for name, usual in _DENSE.items()
        if (value := options.get(name)) is not None
        and not (isinstance(value, (int, float, tuple)) and value == usual)
    ]
    return f"{' and '.join(unusual)}, which a suite cannot have" if unusual else None


def _fused_moe(recorder: Recorder, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    traced = _traced(recorder)

    @functools.wraps(original)
    def fused_moe(
        hidden_states: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        if is_dynamo_compiling():
            traced()
            return original(hidden_states, w13, w2, topk_weights, topk_ids, **options)

        def call() -> torch.Tensor:
            return original(hidden_states, w13, w2, topk_weights, topk_ids, **options)

        if (
            not recorder.active
            or why_not_plain(hidden_states, w13, w2) is not None
            or not problems.are_experts(hidden_states, w2, topk_ids)
        ):
            return call()
        activation = str(options.get("activation", "silu"))
        biased = options.get("w13_bias") is not None or options.get("w2_bias") is not None

        def problem() -> Problem:
            reason = _why_no_case(str(options.get("w13_layout", "concat")), biased)
            if options.get("w13_scales") is not None:
                reason = "quantised weights, which a suite cannot have"
            return problems.experts(
                *(hidden_states, w13, w2, topk_ids.shape[-1], activation),
                baseline="grouped_mm",
                reason=reason,
            )

        described = (
            *("experts", hidden_states.shape, w13.shape, w2.shape, w2.device),
            *(each.dtype for each in (hidden_states, w13, w2)),
            *(topk_ids.shape[-1], activation, str(options.get("w13_layout", "concat"))),
            options.get("w13_scales") is not None,
            biased,
        )
        return recorder.call(described, problem, (hidden_states, w13, w2), call, weights=(w13, w2), ours=True)

    return fused_moe


def _why_no_case(layout: str, biased: bool) -> str | None:
    """Why experts of this kind are no case of a suite; None if they are."""
    if biased:
        return "biases of experts, which capture does not write"
    return None if layout == "concat" else "interleaved weights, which capture does not write"


# ---------------------------------------------------------------- transformers

Seeing = Callable[[Callable[..., Any], "str | None"], Callable[..., Any]]
"""From an implementation and transformers' name of it to one that is seen."""


def _see_interface(stack: ExitStack, name: str, seeing: Seeing, module: ModuleType) -> None:
    """Has what a registry of transformers gives out go through the recorder."""
    interface = getattr(module, name)
    original = interface.get_interface

    @functools.wraps(original)
    def get_interface(self: Any, implementation: str | None, default: Callable[..., Any]) -> Any:
        function = original(self, implementation, default)
        return function if is_dynamo_compiling() else seeing(function, implementation)

    interface.get_interface = get_interface
    stack.callback(setattr, interface, "get_interface", original)


def _layer(recorder: Recorder, function: Callable[..., Any], name: str | None) -> Callable[..., Any]:
    """Attention as a model's layers call it, where it does not come to PyTorch's function."""
    if name in _SEEN_BELOW or not recorder.active:
        return function

    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any, **options: Any
    ) -> Any:
        reason = f"transformers' {name} attention"
        return recorder.call(
            (name, *_key(query, key, value)),
            lambda: problems.attention(
                *(query, key, value), causal=False, lower_right=False, scale=None, grouped=True, reason=reason
            ),
            (query, key, value),
            lambda: function(module, query, key, value, *others, **options),
        )

    return attention


def _experts(recorder: Recorder, function: Callable[..., Any], name: str | None) -> Callable[..., Any]:
    if not recorder.active:
        return function

    def experts(
        module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> Any:
        ours = importlib.import_module("flashmoe_science.huggingface.experts")
        w13 = getattr(module, "gate_up_proj", None)
        w2 = getattr(module, "down_proj", None)
        top_k = top_k_index.shape[-1]
        plain = w13 is not None and problems.are_experts(hidden_states, w2, top_k_index)

        def problem() -> Problem:
            reason = ours.why_not_call(module, hidden_states, top_k_weights)
            if reason is None and name not in _BASELINES:
                reason = f"transformers' {name} experts, which the lab does not race"
            if not plain or w13 is None or w2 is None:
                reason = reason or "tensors of another form"
                return problems.elsewhere(Kind.EXPERTS, "experts", hidden_states, reason)
            layer = ours.layer_of(module)
            activation = None if isinstance(layer, str) else layer.activation
            if reason is None and not isinstance(layer, str):
                reason = _why_no_case(layer.layout, layer.w13_bias is not None)
            turned = (w13.transpose(1, 2), w2.transpose(1, 2)) if module.is_transposed else (w13, w2)
            return problems.experts(
                *(hidden_states, *turned, top_k, activation),
                baseline=_BASELINES.get(str(name), ""),
                reason=reason,
            )

        tensors = tuple(
            each for each in (hidden_states, w13, w2, top_k_weights) if isinstance(each, torch.Tensor)
        )
        needed = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
        described = (
            *(name, top_k, needed, type(module), type(getattr(module, "act_fn", None))),
            *((each.shape, each.dtype, each.device) for each in tensors),
        )
        return recorder.call(
            described,
            problem,
            tensors,
            lambda: function(module, hidden_states, top_k_index, top_k_weights),
            weights=tuple(
                each for each in (w13, w2) if isinstance(each, torch.Tensor) and type(each) in _PLAIN
            ),
        )

    return experts
