"""What the Hopper kernels of attention backward have in common: what they take, and the launch before them.

`kernels/cuda/attention_backward_prepare.cu` makes what the backward pass needs of each query row beforehand.
"""

from __future__ import annotations

import struct

import torch

from flashmoe_science.configs.attention.backward_hopper import PREPARE_DEPTH, PREPARE_THREADS, HopperBackward
from flashmoe_science.configs.attention.backward_short import ShortBackward
from flashmoe_science.configs.attention.backward_two_pass import TwoPassBackward
from flashmoe_science.cuda.attention.gradients.problem import BackwardProblem
from flashmoe_science.cuda.attention.problem import Strides
from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.launch import Launcher, loaded
from flashmoe_science.cuda.tensor_map import TensorMap
from flashmoe_science.cuda.wgmma import built_for as built_for
from flashmoe_science.cuda.wgmma import why_not_device as why_not_device
from flashmoe_science.errors import InputError
from flashmoe_science.jit.nvrtc import CudaKernel

PREPARE = struct.Struct("8Q")  # output, grad_output, lse, grad_lse, lse_log2, delta, turns, grad_query or 0
_PREPARE_REST = struct.Struct("12q 4i")
PREPARE_BYTES = PREPARE.size + _PREPARE_REST.size
_STORED = 64  # rows, and columns
_MOST_HEADS = 65535  # of a grid's second dimension
Maps = tuple[TensorMap, TensorMap, TensorMap, TensorMap]
"""Of query, key, value and grad_output; re-addressed when their tensor moved."""


def why_not_problem(problem: BackwardProblem) -> str | None:
    """Why none of them can do the problem on any GPU, whatever its head dimension, the gradients it needs, its window
    and its cap.
    """
    if problem.softmax_scale <= 0:
        return f"softmax_scale is {problem.softmax_scale:g}, and it needs a positive one"
    if problem.seqlen_q == 0 or problem.seqlen_k == 0:
        return "there are no query rows or no keys"
    if problem.batch * problem.num_heads > _MOST_HEADS:
        return f"there are more than {_MOST_HEADS} heads in the batch"
    if not _all_mappable(problem):
        return "its tensor maps cannot describe an expanded dimension"
    return None


def check_fits(
    problem: BackwardProblem, configuration: TwoPassBackward | HopperBackward | ShortBackward
) -> None:
    """Raise InputError where the configuration was chosen for another problem."""
    if problem.head_dim > configuration.head_dim or problem.causal != configuration.causal:
        raise InputError(
            f"head_dim is {problem.head_dim} and causal {problem.causal}; expected at most the head_dim, and the "
            f"same causal, of {configuration}: choose again"
        )


def _all_mappable(problem: BackwardProblem) -> bool:
    queries = problem.batch, problem.num_heads, problem.seqlen_q
    keys = problem.batch, problem.num_kv_heads, problem.seqlen_k
    return all(
        is_mappable(strides, sizes)
        for strides, sizes in (
            (problem.query_strides, queries),
            (problem.grad_output_strides, queries),
            (problem.key_strides, keys),
            (problem.value_strides, keys),
        )
    )


def is_mappable(strides: Strides, sizes: tuple[int, int, int]) -> bool:
    """Whether a tensor map can describe a tensor: no dimension is expanded."""
    return all(stride > 0 or size == 1 for stride, size in zip(strides, sizes, strict=True))


def kernel(
    name: str, dtype: torch.dtype, macros: dict[str, int], threads: int, shared_bytes: int = 0
) -> CudaKernel:
    return CudaKernel(
        source=f"{name}.cu",
        function=name,
        architecture="sm_90a",
        macros={**macros, "ELEMENT_BF16": int(dtype == torch.bfloat16), "MMA_K": 16},
        threads_per_block=threads,
        dynamic_shared_bytes=shared_bytes,
    )


def prepare_kernel(dtype: torch.dtype, *, lanes: int, block_m: int, pieces: int) -> CudaKernel:
    """
    Args:
        lanes: that share a row, eight elements each.
        block_m: of how many query rows a head's are a multiple, with those past its end.
        pieces: turns per block of query rows.
    """
    macros = {"LANES": lanes, "BLOCK_M": block_m, "PIECES": pieces}
    return kernel("attention_backward_prepare", dtype, macros, PREPARE_THREADS)


def prepare_launcher(
    problem: BackwardProblem,
    device: Device,
    *,
    lanes: int,
    block_m: int,
    pieces: int,
    allow_defects: bool,
) -> Launcher:
    """It waits for all that came before. What comes next may start early, and waits where it reads what this wrote."""
    m_blocks = -(-problem.seqlen_q // block_m)
    prepare = loaded(
        prepare_kernel(problem.dtype, lanes=lanes, block_m=block_m, pieces=pieces),
        device,
        (
            -(-m_blocks * block_m // (PREPARE_THREADS // lanes * PREPARE_DEPTH)),
            problem.batch * problem.num_heads,
            1,
        ),
        PREPARE_BYTES,
        allow_defects=allow_defects,
    )
    element = problem.dtype.itemsize
    _PREPARE_REST.pack_into(
        prepare.buffer,
        PREPARE.size,
        *(stride * element for stride in (*problem.output_strides, *problem.grad_output_strides)),
        *(problem.num_heads * problem.seqlen_q, problem.seqlen_q, 1),
        *(stride * element for stride in problem.grad_query_strides),
        problem.num_heads,
        problem.seqlen_q,
        m_blocks,
        problem.head_dim,
    )
    return prepare


def tensor_maps(
    problem: BackwardProblem,
    launcher: Launcher,
    map_bytes: int,
    *,
    columns: int,
    query_rows: int,
    key_rows: int,
) -> Maps:
    """Of query, key, value and grad_output, at the head of a kernel's argument.

    ``columns``, ``query_rows``, ``key_rows``: of the boxes that are loaded.
    """
    queries = problem.num_heads, problem.seqlen_q, query_rows
    keys = problem.num_kv_heads, problem.seqlen_k, key_rows

    def tensor_map(index: int, heads: int, rows: int, box_rows: int, strides: Strides) -> TensorMap:
        return TensorMap(
            launcher.buffer,
            index * map_bytes,
            problem.dtype,
            (problem.head_dim, rows, heads, problem.batch),
            (strides[2], strides[1], strides[0]),
            (columns, box_rows),
        )

    return (
        tensor_map(0, *queries, problem.query_strides),
        tensor_map(1, *keys, problem.key_strides),
        tensor_map(2, *keys, problem.value_strides),
        tensor_map(3, *queries, problem.grad_output_strides),
    )


def grad_query_map(problem: BackwardProblem, launcher: Launcher, at: int) -> TensorMap:
    """Of what is stored at a time."""
    return row_map(problem, launcher, at, problem.grad_query_strides, columns=_STORED, rows=_STORED)


def row_map(
    problem: BackwardProblem, launcher: Launcher, at: int, strides: Strides, *, columns: int, rows: int
) -> TensorMap:
    """Of a tensor with the query's shape, by boxes of ``rows`` by ``columns``."""
    return TensorMap(
        launcher.buffer,
        at,
        problem.dtype,
        (problem.head_dim, problem.seqlen_q, problem.num_heads, problem.batch),
        (strides[2], strides[1], strides[0]),
        (columns, rows),
    )


def move(maps: Maps, query: int, key: int, value: int, grad_output: int) -> None:
    of_query, of_key, of_value, of_gradient = maps
    if of_query.address != query:
        of_query.move(query)
    if of_key.address != key:
        of_key.move(key)
    if of_value.address != value:
        of_value.move(value)
    if of_gradient.address != grad_output:
        of_gradient.move(grad_output)
