"""Calls of attention's portable backward kernels, made by their own source on the CPU."""

from __future__ import annotations

import ctypes
import dataclasses
import math

import torch
from attention_backward import Backward, backward_case
from emulated import compile_emulation

from flashmoe_science.configs.attention.backward import KeyValueTile, PortableBackward, QueryTile
from flashmoe_science.cuda.attention.gradients import BackwardProblem, portable
from flashmoe_science.cuda.attention.problem import strides_of
from flashmoe_science.gradients import Needs
from flashmoe_science.jit.nvrtc import CudaKernel
from problems import L4

BF16, FP16 = torch.bfloat16, torch.float16
ALL = Needs(True, True, True)


def problem_of(case: Backward, needs: Needs = ALL) -> BackwardProblem:
    query, key = case.query, case.key
    strides = {
        name: strides_of(name, tensor)
        for name, tensor in (("query", query), ("key", key), ("value", case.value), ("output", case.output))
    }
    return BackwardProblem(
        batch=query.shape[0],
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        seqlen_q=query.shape[2],
        seqlen_k=key.shape[2],
        head_dim=query.shape[3],
        dtype=query.dtype,
        causal=case.causal,
        softmax_scale=case.scale,
        needs=needs,
        query_strides=strides["query"],
        key_strides=strides["key"],
        value_strides=strides["value"],
        output_strides=strides["output"],
        grad_output_strides=strides_of("grad_output", case.grad_output),
        grad_query_strides=strides["query"],
        grad_key_strides=strides["key"],
        grad_value_strides=strides["value"],
        window_left=case.window[0],
        window_right=case.window[1],
        softcap=case.softcap,
    )


def case_of(
    lengths: tuple[int, int] = (37, 53),
    head_dim: int = 32,
    *,
    heads: tuple[int, int] = (2, 1),
    dtype: torch.dtype = BF16,
    causal: bool = True,
    scale: float | None = None,
    grad_lse: bool = False,
    factor: float = 1.0,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Backward:
    torch.manual_seed(sum(lengths) + head_dim)
    (seqlen_q, seqlen_k), (h, kv) = lengths, heads
    query, key = torch.randn(2, h, seqlen_q, head_dim), torch.randn(2, kv, seqlen_k, head_dim)
    value, grad = torch.randn(2, kv, seqlen_k, head_dim), factor * torch.randn(2, h, seqlen_q, head_dim)
    return backward_case(
        *(tensor.to(dtype) for tensor in (query, key, value, grad)),
        causal=causal,
        scale=scale,
        grad_lse=torch.randn(2, h, seqlen_q) if grad_lse else None,
        window=window,
        softcap=softcap,
    )


QUERY = QueryTile(head_dim=32, block_m=32, block_n=32, chunk=16, warps=2)
SINGLE = KeyValueTile(head_dim=32, block_n=32, block_m=32, chunk=16, warps=2, roles=1)
TILES = {
    "operands from shared memory, one role": PortableBackward(QUERY, SINGLE),
    "operands in registers, two roles": PortableBackward(
        dataclasses.replace(QUERY, block_m=64, chunk=32, register_steps=2),
        dataclasses.replace(SINGLE, block_n=32, chunk=32, roles=2, warps=4),
    ),
    "part of the operands in registers": PortableBackward(
        dataclasses.replace(QUERY, register_steps=1),
        dataclasses.replace(SINGLE, roles=2, warps=4),
    ),
    "one pass, one role": PortableBackward(
        QUERY, SINGLE, dataclasses.replace(SINGLE, block_n=64, block_m=64, warps=4, queries=True)
    ),
    "one pass, two roles": PortableBackward(
        QUERY, SINGLE, dataclasses.replace(SINGLE, block_m=64, chunk=64, roles=2, warps=4, queries=True)
    ),
}

ONE_PASS = ["one pass, one role", "one pass, two roles"]


class Emulation:
    """The kernels of some tiles as functions on CPU tensors."""

    def __init__(self) -> None:
        self._libraries: dict[str, ctypes.CDLL] = {}

    def _run(
        self, kernel: CudaKernel, fields: tuple[float, ...], addresses: list[int], together: int = 1
    ) -> None:
        library = self._libraries.get(kernel.label)
        if library is None:
            # Copies as late as they may happen, but in the second of two passes as early.
            late = kernel.function.endswith("query") or bool(kernel.macros.get("QUERIES"))
            library = compile_emulation(kernel, "BackwardParameters", copies_late=late)
            self._libraries[kernel.label] = library
        argument = ctypes.create_string_buffer(portable.ARGUMENT_BYTES)
        portable.POINTERS.pack_into(argument, 0, *addresses)
        portable.pack_fields(argument, fields)
        library.run_together(argument, portable.blocks(fields), 1, together)

    def backward(
        self, case: Backward, tiles: PortableBackward, needs: Needs = ALL, *, together: int = 1
    ) -> tuple[torch.Tensor | None, ...]:
        problem = problem_of(case, needs)
        if not problem.is_plain:
            tiles = tiles.with_features(portable.features(problem))
        gradients = [
            torch.full_like(tensor, math.nan) if needed else None
            for needed, tensor in zip(needs, (case.query, case.key, case.value), strict=True)
        ]
        single = portable.one_pass(problem, tiles)
        workspace = [torch.full((size // 4,), math.nan) for size in portable.workspace_bytes(problem, single)]
        inputs = (case.query, case.key, case.value, case.output, case.grad_output, case.lse, case.grad_lse)
        addresses = [
            0 if tensor is None else tensor.data_ptr()
            for tensor in (*inputs, *gradients, *workspace, *[None] * (4 - len(workspace)))
        ]
        dtype = problem.dtype
        if needs.query and single is None:
            kernel = portable.query_kernel(tiles.query, dtype, "sm_80")
            self._run(kernel, portable.query_fields(problem, tiles.query, L4), addresses)
        else:
            kernel = portable.statistics_kernel(dtype, "sm_80")
            self._run(kernel, portable.statistics_fields(problem), addresses)
        if needs.key or needs.value:
            tile = single or tiles.key_value
            kernel = portable.key_value_kernel(tile, dtype, "sm_80")
            self._run(kernel, portable.key_value_fields(problem, tile, L4), addresses, together)
        return tuple(gradients)
