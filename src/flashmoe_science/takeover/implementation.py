"""The kernels as an implementation of PyTorch's own flash attention: for ``torch.nn.attention``'s registry of them.

Here PyTorch's operators themselves are replaced, below its choice among flash, cuDNN and others. That reaches every
caller, compiled graphs included, but only calls for which PyTorch chose one of these: no masks, and on CUDA causal ones
with as many queries as keys. On Hopper its first choice is cuDNN, so that cuDNN's operators are replaced as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashmoe_science.cpu import attention as cpu
from flashmoe_science.cuda import attention as cuda
from flashmoe_science.errors import InputError
from flashmoe_science.gradients import Backend, Gradients, Needs
from flashmoe_science.takeover.availability import REFUSALS, failed
from flashmoe_science.takeover.conditions import why_not
from flashmoe_science.takeover.counts import Entry, count

NAME = "cudadent42"
_BACKENDS: dict[str, Backend] = {"CPU": cpu, "CUDA": cuda}
_failures: dict[tuple[str, torch.dtype, int], str] = {}


@dataclass(frozen=True)
class _Call:
    """What the operators of all kinds have in common."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    dropout_p: float
    is_causal: bool
    scale: float | None
    mask: torch.Tensor | None = None

    def why_not(self) -> str | None:
        if self.dropout_p != 0:
            return "dropout"
        if self.mask is not None:
            return "a mask"
        if self.is_causal and self.query.shape[-2] != self.key.shape[-2]:
            return "lengths differ in a causal call"
        return why_not(self.query, self.key, self.value, self.scale, grouped=True)

    def attempt(self, function: Callable[[], Any]) -> Any:
        """Its result, or a reason."""
        reason = self.why_not()
        if reason is not None:
            return reason
        kernel = self.query.device.type, self.query.dtype, self.query.shape[-1]
        if kernel in _failures:
            return _failures[kernel]
        try:
            with torch.no_grad():  # this is below autograd, which records the operator
                return function()
        except REFUSALS as error:
            return failed(_failures, kernel, error)


def _forward(backend: Backend, call: _Call) -> Any:
    return call.attempt(
        lambda: backend.forward(
            call.query,
            call.key,
            call.value,
            causal=call.is_causal,
            softmax_scale=call.scale,
            return_lse=True,
        )
    )


def _backward(
    backend: Backend, call: _Call, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> Any:
    def gradients() -> Gradients:
        assert backend.backward is not None
        return backend.backward(
            grad_out,
            call.query,
            call.key,
            call.value,
            out,
            lse,
            None,
            causal=call.is_causal,
            softmax_scale=call.scale,
            needs=Needs(True, True, True),
        )

    return call.attempt(gradients)


def _flash(
    backend: Backend, query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    result = _forward(backend, _Call(query, key, value, dropout_p, is_causal, scale))
    if isinstance(result, str):
        return result
    seed = torch.empty((2,), dtype=torch.uint64, device=query.device)  # nothing reads it: there is no dropout
    offset = torch.empty((), dtype=torch.uint64, device=query.device)
    debug_mask = torch.empty((0,), dtype=query.dtype, device=query.device)
    return *result, None, None, query.shape[2], key.shape[2], seed, offset, debug_mask


def _flash_backward(
    backend: Backend, grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, cum_seq_q: Any,
    cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, philox_seed: Any, philox_offset: Any,
    *, scale: float | None = None,
) -> Any:  # fmt: skip
    return _backward(backend, _Call(query, key, value, dropout_p, is_causal, scale), grad_out, out, logsumexp)


def _cudnn(
    backend: Backend, query: Any, key: Any, value: Any, attn_bias: Any, compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    result = _forward(backend, _Call(query, key, value, dropout_p, is_causal, scale, attn_bias))
    if isinstance(result, str):
        return result
    output, lse = result
    seed, offset = (torch.empty((), dtype=torch.int64, device=query.device) for _ in range(2))
    return output, lse[..., None], None, None, query.shape[2], key.shape[2], seed, offset, None


def _cudnn_backward(
    backend: Backend, grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, philox_seed: Any,
    philox_offset: Any, attn_bias: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, *, scale: float | None = None,
) -> Any:  # fmt: skip
    call = _Call(query, key, value, dropout_p, is_causal, scale, attn_bias)
    return _backward(backend, call, grad_out, out, logsumexp.reshape(query.shape[:3]))


def _flash_for_cpu(
    backend: Backend, query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False,
    *, attn_mask: Any = None, scale: float | None = None,
) -> Any:  # fmt: skip
    result = _forward(backend, _Call(query, key, value, dropout_p, is_causal, scale, attn_mask))
    # Compiled graphs rely on the layout of PyTorch's own results.
    return result if isinstance(result, str) else (result[0], _laid_out(result[1], (0, 2, 1)))


def _flash_for_cpu_backward(
    backend: Backend, grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, dropout_p: float,
    is_causal: bool, *, attn_mask: Any = None, scale: float | None = None,
) -> Any:  # fmt: skip
    call = _Call(query, key, value, dropout_p, is_causal, scale, attn_mask)
    result = _backward(backend, call, grad_out, out, logsumexp)
    return result if isinstance(result, str) else tuple(_laid_out(each, (0, 2, 1, 3)) for each in result)


def _laid_out(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """A copy, if need be, whose dimensions lie in memory in this order, which is its own inverse."""
    return tensor.permute(*order).contiguous().permute(*order)


_OPERATORS: dict[str, dict[str, Callable[..., Any]]] = {
    "CUDA": {
        "_scaled_dot_product_flash_attention": _flash,
        "_scaled_dot_product_flash_attention_backward": _flash_backward,
        "_scaled_dot_product_cudnn_attention": _cudnn,
        "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    },
    "CPU": {
        "_scaled_dot_product_flash_attention_for_cpu": _flash_for_cpu,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _flash_for_cpu_backward,
    },
}


class _Handle:
    """What PyTorch keeps while the implementation is active."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def remove(self) -> None:
        """PyTorch's own kernels are back."""
        if self._library is not None:
            self._library._destroy()
            self._library = None


def register_flash_attention_impl() -> None:
    """Make the name ``cudadent42`` known to ``torch.nn.attention.activate_flash_attention_impl``; activates nothing.

    Once active, what PyTorch gives to its flash attention and to cuDNN's (on a CPU, to its own) is ours where the
    kernels take it, and goes to PyTorch's kernel where not. ``torch.nn.attention.restore_flash_attention_impl()`` ends
    it. `sdpa` takes more: it is there before PyTorch chooses.

    Raises:
        InputError: this PyTorch has no such registry.
    """
    try:
        from torch.nn.attention import register_flash_attention_impl as register
    except ImportError:
        raise InputError(
            f"PyTorch {torch.__version__} has no register_flash_attention_impl; use flashmoe_science.sdpa()"
        ) from None
    register(NAME, register_fn=_activate)


def _activate() -> _Handle:
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # that one is replaced
        for key, operators in _OPERATORS.items():
            for name, function in operators.items():
                if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):  # not without CUDA
                    kernel = _replacing(name, key, function)
                    library.impl(name, kernel, key, with_keyset=True)
    return _Handle(library)


def _replacing(name: str, key: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that calls PyTorch's for what the function declines."""
    previous, backend = torch.library.get_kernel(f"aten::{name}", key), _BACKENDS[key]

    def kernel(keys: Any, *arguments: Any, **options: Any) -> Any:
        result = function(backend, *arguments, **options)
        if isinstance(result, str):
            count(Entry.FLASH_IMPLEMENTATION, result)
            return previous.call_boxed(keys, *arguments, **options)
        count(Entry.FLASH_IMPLEMENTATION, None)
        return result

    return kernel
