"""``torch.ops.flashmoe_science.rotate``: queries and keys turned by their positions (RoFormer, arXiv:2104.09864)."""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science.cuda import rotation as cuda
from flashmoe_science.errors import InputError
from flashmoe_science.operators.library import define
from flashmoe_science.operators.recording import below_autograd, is_recorded, record, reject_tangents

Rotated = tuple[torch.Tensor, torch.Tensor]


def check(query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> None:
    """Raise InputError unless the arguments of `ROTATE` fit each other."""
    if query.dim() != 4 or key.dim() != 4 or cosine.dim() != 3:
        raise InputError(
            "expected query and key (batch, heads, tokens, head_dim), cosine and sine (batch, tokens, head_dim)"
        )
    batch, _, tokens, head_dim = query.shape
    if (key.shape[0], key.shape[2], key.shape[3]) != (batch, tokens, head_dim):
        raise InputError(
            f"key is {tuple(key.shape)}; expected the batch, tokens and head_dim of query's {tuple(query.shape)}"
        )
    if (
        cosine.shape != sine.shape
        or cosine.shape[0] not in (1, batch)
        or cosine.shape[1] != tokens
        or cosine.shape[2] not in (head_dim, head_dim // 2)
        or head_dim % 2 != 0
    ):
        raise InputError(
            f"cosine and sine are {tuple(cosine.shape)} and {tuple(sine.shape)}; "
            f"expected ({batch} or 1, {tokens}, {head_dim} or half of it)"
        )
    for name, tensor in (("key", key), ("cosine", cosine), ("sine", sine)):
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise InputError(
                f"{name} is {tensor.dtype} on {tensor.device}; expected the dtype and device of query"
            )


def _on_cpu(
    query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, inverse: bool = False
) -> Rotated:
    """PyTorch's operations."""
    check(query, key, cosine, sine)
    half = query.shape[3] // 2
    cosine, other_cosine = cosine[:, None, :, :half], cosine[:, None, :, -half:]
    sine, other_sine = sine[:, None, :, :half], sine[:, None, :, -half:]
    if inverse:
        sine, other_sine = -other_sine, -sine

    def turned(tensor: torch.Tensor) -> torch.Tensor:
        x, y = tensor[..., :half], tensor[..., half:]
        result = torch.empty_like(tensor)
        result[..., :half] = x * cosine - y * sine
        result[..., half:] = y * other_cosine + x * other_sine
        return result

    return turned(query), turned(key)


def _on_cuda(
    query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, inverse: bool = False
) -> Rotated:
    check(query, key, cosine, sine)
    query, key, cosine, sine = (cuda.readable(each) for each in (query, key, cosine, sine))
    return cuda.rotate(query, key, cosine, sine, inverse)


def _fake(
    query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, inverse: bool = False
) -> Rotated:
    return torch.empty_like(query), torch.empty_like(key)


class _Rotation(torch.autograd.Function):
    """Keeps the cosines and sines alone: the gradient is turned back by them."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        inverse: bool,
    ) -> Rotated:
        ctx.save_for_backward(cosine, sine)
        ctx.inverse = inverse
        rotated: Rotated = below_autograd(ROTATE, query, key, cosine, sine, inverse)
        return rotated

    @staticmethod
    def backward(ctx: Any, grad_query: torch.Tensor, grad_key: torch.Tensor) -> Any:
        cosine, sine = ctx.saved_tensors
        return *ROTATE(grad_query, grad_key, cosine, sine, not ctx.inverse), None, None, None


def _recorded(
    query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, inverse: bool = False
) -> Rotated:
    reject_tangents("rotate", query, key, cosine, sine)
    if is_recorded(cosine, sine):
        raise InputError("cosine and sine of rotate have no gradient; detach() them")
    rotated: Rotated = (
        record(_Rotation, query, key, cosine, sine, inverse)
        if is_recorded(query, key)
        else below_autograd(ROTATE, query, key, cosine, sine, inverse)
    )
    return rotated


ROTATE = define(
    "rotate(Tensor query, Tensor key, Tensor cosine, Tensor sine, bool inverse=False)"
    " -> (Tensor rotated_query, Tensor rotated_key)",
    cpu=_on_cpu,
    cuda=_on_cuda,
    fake=_fake,
    recorded=_recorded,
    flops="it multiplies no matrices",
    sharding=None,
)
"""Queries and keys turned by their positions: of a head's halves x and y, x cos - y sin and y cos + x sin.

Args:
    query: (batch, heads, tokens, head_dim).
    key: (batch, kv_heads, tokens, head_dim), like query.
    cosine, sine: (batch or 1, tokens, head_dim), a half for each half of a head, or (batch or 1, tokens, head_dim / 2)
        for both; like query. They have no gradient.
    inverse: turn back.

Returns:
    Both, like query and key.

Raises:
    InputError: arguments that do not fit; on a GPU what `cuda.rotation.why_not` says of other things than rows. Rows
        that the kernel cannot read are copied.
"""
