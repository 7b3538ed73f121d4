"""``Cudadent42Attention`` of ``cudadent42/attention.h``, filled from tensors."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING

from cudadent42.native.specification import Dimension, Factor, Grid

if TYPE_CHECKING:
    from torch import Tensor

    from cudadent42.operations.attention.case import AttentionCase
    from cudadent42.operations.attention.inputs import AttentionInputs

ELEMENTS = {"fp32": 0, "bf16": 1, "fp16": 2}
"""CUDADENT42_FP32, _BF16 and _FP16."""


class Problem(ctypes.Structure):
    """Field by field as the header has them; sizes and strides in elements."""

    _fields_ = (
        ("query", ctypes.c_uint64),
        ("key", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("output", ctypes.c_uint64),
        ("batch", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("seqlen_q", ctypes.c_int64),
        ("seqlen_k", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("query_stride", ctypes.c_int64 * 3),
        ("key_stride", ctypes.c_int64 * 3),
        ("value_stride", ctypes.c_int64 * 3),
        ("output_stride", ctypes.c_int64 * 3),
        ("softmax_scale", ctypes.c_double),
        ("causal", ctypes.c_int32),
        ("element", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


def fill(
    problem: Problem, case: AttentionCase, inputs: AttentionInputs, output: Tensor, threads: int
) -> None:
    """Write everything but the output's address, which every call has another of; ``output`` gives its strides."""
    problem.query = inputs.query.data_ptr()
    problem.key = inputs.key.data_ptr()
    problem.value = inputs.value.data_ptr()
    for name in ("batch", "num_heads", "num_kv_heads", "seqlen_q", "seqlen_k", "head_dim"):
        setattr(problem, name, getattr(case, name))
    for name, tensor in (
        ("query", inputs.query),
        ("key", inputs.key),
        ("value", inputs.value),
        ("output", output),
    ):
        setattr(problem, f"{name}_stride", tensor.stride()[:3])
    problem.softmax_scale = inputs.scale
    problem.causal = int(case.causal)
    problem.element = ELEMENTS[case.dtype]
    problem.threads = threads


def blocks(grid: Grid, case: AttentionCase, multiprocessors: int) -> tuple[int, int, int]:
    """The grid of a case: the product of each axis's factors."""

    def size(factor: Factor) -> int:
        whole = (
            multiprocessors
            if factor.dimension is Dimension.MULTIPROCESSORS
            else int(getattr(case, factor.dimension.value))
        )
        return -(-whole // factor.per)

    x, y, z = (math.prod(size(factor) for factor in axis) for axis in grid)
    return x, y, z
