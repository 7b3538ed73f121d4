"""A call on plain tensors: the signature, what is ready for it, the results' memory, the launch."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from flashmoe_science.arguments import reject_without_memory
from flashmoe_science.cpu import varlen as cpu
from flashmoe_science.cuda import varlen as cuda
from flashmoe_science.errors import DeviceError, InputError
from flashmoe_science.plans import keep
from flashmoe_science.varlen.arguments import Inputs, Options, check, check_sizes, signature_of
from flashmoe_science.varlen.problem import Backend, Problem, Run, Tensors

_BACKENDS: dict[str, Backend] = {"cpu": cpu, "cuda": cuda}
_MAX_RUNS = 1024
_runs: dict[tuple[object, ...], Run] = {}


def launch(
    inputs: Inputs, options: Options, max_seqlen_q: int, max_seqlen_k: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output and, if the options ask for it, the log-sum-exp: see `attention.attention_varlen`."""
    query, key, value, cu_seqlens_q, cu_seqlens_k, block_table, seqused_k, sinks, alibi_slopes, out = inputs
    try:
        signature = signature_of(inputs, options)
        run = _runs.get(signature)
    except (AttributeError, IndexError, TypeError, RuntimeError):
        # Not tensors, not dense, without dimensions, or an option that cannot be hashed: the checks say which.
        check(inputs, options)
        raise
    if run is None:
        problem = check(inputs, options)
        check_sizes(inputs, max_seqlen_q, max_seqlen_k)  # before anything is compiled
        reject_gradients(query, key, value, sinks, alibi_slopes, out)
        run = _prepare(problem, query.device)
        keep(_runs, signature, run, _MAX_RUNS)
    sizes = check_sizes(inputs, max_seqlen_q, max_seqlen_k)
    if query.requires_grad or key.requires_grad or value.requires_grad:
        reject_gradients(query, key, value)
    if sinks is not None or alibi_slopes is not None or out is not None:
        reject_gradients(sinks, alibi_slopes, out)
    if type(query) is not torch.Tensor:
        reject_without_memory(query=query, key=key, value=value)
    tokens, num_heads, _ = query.shape
    if out is None:
        out = query.new_empty((tokens, num_heads, value.shape[-1]))
    lse = query.new_empty((tokens, num_heads), dtype=torch.float32) if options.return_lse else None
    if tokens and num_heads:
        run(
            Tensors(
                query,
                key,
                value,
                out,
                lse,
                cu_seqlens_q,
                cu_seqlens_k,
                block_table,
                seqused_k,
                sinks,
                alibi_slopes,
            ),
            sizes,
        )
    return out, lse


def _prepare(problem: Problem, device: torch.device) -> Run:
    """Choose, compile and load, once for each problem."""
    backend = _BACKENDS.get(device.type)
    if backend is None:
        raise DeviceError(
            f"there is no kernel of attention_varlen for {device}; expected tensors on "
            f"{' or '.join(_BACKENDS)}: move them with .to()"
        )
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return backend.prepare(problem, device)


def reject_gradients(*tensors: torch.Tensor | None) -> None:
    """Raise InputError if autograd would record a call with these."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise InputError(
            "an argument requires a gradient, and attention_varlen has none; call it under torch.no_grad(), or "
            "flash_attention for each sequence"
        )
