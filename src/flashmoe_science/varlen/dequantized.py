"""Calls over a cache of FP8 for kernels that read none: the keys that a batch has are first widened in memory.

The decode kernel of CUDA needs no such copy. What comes here are prompts, and calls on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from flashmoe_science.varlen.problem import Problem, Run, Sizes, Tensors


def prepare(problem: Problem, dtype: torch.dtype, prepare_wide: Callable[[Problem], Run]) -> Run:
    """What makes calls of a quantised problem by a kernel for ``dtype``.

    Keys and values are widened and scaled in ``dtype``: exact in float32, rounded once in 16 bits. On the CPU the pages
    that hold keys are copied, each once. Elsewhere nobody reads lengths: of each sequence as many pages are copied as
    `max_seqlen_k` keys take.

    Args:
        prepare_wide: see `problem.Backend.prepare`, on the device that the tensors will be on.
    """
    page = problem.page_size
    run_wide = prepare_wide(widened(problem, dtype))

    def run(tensors: Tensors, sizes: Sizes) -> None:
        pages, table = None, tensors.block_table
        if table is not None:
            lengths = tensors.seqused_k if table.is_cpu else None
            if lengths is None:
                table = table[:, : -(-sizes.max_seqlen_k // page)]
            there = (table >= 0) & (table < tensors.key.shape[0])
            if lengths is not None:
                first_key = torch.arange(table.shape[1], dtype=torch.int64, device=table.device) * page
                there &= first_key < lengths[:, None]
                pages, numbers = torch.unique(table[there].long(), return_inverse=True)
                table = torch.full_like(table, -1).masked_scatter_(there, numbers.int())
            else:
                pages = torch.where(there, table, 0).flatten().long()
                numbers = torch.arange(pages.numel(), dtype=torch.int32, device=table.device).view(
                    table.shape
                )
                table = torch.where(there, numbers, -1)
        output = torch.empty(tensors.output.shape, dtype=dtype, device=tensors.output.device)
        run_wide(
            tensors._replace(
                query=tensors.query.to(dtype).contiguous(),
                key=_widened(tensors.key, tensors.key_scale, pages, dtype),
                value=_widened(tensors.value, tensors.value_scale, pages, dtype),
                output=output,
                block_table=table,
                key_scale=None,
                value_scale=None,
            ),
            sizes,
        )
        tensors.output.copy_(output)

    return run


def widened(problem: Problem, dtype: torch.dtype) -> Problem:
    """The problem of the copy, as which a quantised one is computed."""
    page, heads = problem.page_size, problem.num_kv_heads

    def strides(dim: int) -> tuple[int, int, int]:
        return page * heads * dim, heads * dim if page != 1 else 0, dim if heads > 1 else 0

    return replace(
        problem,
        dtype=dtype,
        quantized=None,
        query_strides=(problem.num_heads * problem.head_dim, problem.head_dim),
        key_strides=strides(problem.head_dim),
        value_strides=strides(problem.value_dim),
        output_strides=(problem.num_heads * problem.value_dim, problem.value_dim),
    )


def _widened(
    cache: torch.Tensor, scale: torch.Tensor | None, pages: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Rows of a cache, or copies of its pages, in ``dtype``."""
    if pages is not None and cache.shape[0]:
        cache = cache.view(torch.uint8)[pages].view(cache.dtype)
        scale = scale[pages] if scale is not None and scale.dim() > 1 else scale
    rows = cache.to(dtype, memory_format=torch.contiguous_format)  # exact
    return rows if scale is None else rows.mul_(scale[..., None])  # in float32
