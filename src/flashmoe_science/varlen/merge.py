"""Attention over parts of the keys, merged into attention over all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.compiler import is_dynamo_compiling

from flashmoe_science.arguments import DTYPES, check_dense
from flashmoe_science.errors import InputError


def merge_attention(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    *,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result for all keys from results for parts of them: a shared prefix and the rest, or parts of many devices.

    Each part's output is weighted by exp(lse), in float32, in the order given. Composed of PyTorch operations on every
    device: nothing is compiled and nothing synchronised.

    Args:
        outs: of at least one part, each (..., heads, value_dim), of one dtype.
        lses: of the same parts, each (..., heads), natural, as `attention_varlen` returns it; minus infinity where a
            part has no key for a row.
        sinks: (heads,) float32, added once here. The parts must then have been computed without.
        out: like the first of outs: the result goes there.

    Returns:
        The output, like the first of outs, and its log-sum-exp, float32, without the sink. Rows without keys in any
        part give zeros and minus infinity.

    Raises:
        InputError: shapes, dtypes or devices that do not fit together.

    Reference: Dao et al., Flash-Decoding for long-context inference (2023).
    """
    _check(outs, lses, sinks, out)
    stacked = torch.stack([lse.float() for lse in lses])
    largest = stacked.amax(0)
    # Where there are no keys at all, weights are exp(-inf - 0) = 0.
    base = torch.where(largest == -torch.inf, 0.0, largest)
    weights = (stacked - base).exp()
    total = weights.sum(0)
    merged_lse = base + total.log()
    divisor = total if sinks is None else total + (sinks - base).exp()
    merged = torch.zeros_like(outs[0], dtype=torch.float32)
    for part, weight in zip(outs, weights, strict=True):
        # What a part without keys has in its output does not matter.
        merged += torch.where(weight[..., None] == 0, 0.0, part.float() * weight[..., None])
    merged = torch.where(total[..., None] == 0, 0.0, merged / divisor[..., None])
    if out is None:
        return merged.to(outs[0].dtype), merged_lse
    return out.copy_(merged), merged_lse


def _check(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, Sequence | torch.Tensor):
            raise InputError(f"{name} is a {type(parts).__name__}; expected a sequence of torch.Tensors")
        if isinstance(parts, torch.Tensor):
            check_dense(**{name: parts})
            if not parts.dim():
                raise InputError(
                    f"{name} is one number; expected a tensor of all parts, the first dimension theirs"
                )
    if len(outs) == 0 or len(outs) != len(lses):
        raise InputError(
            f"outs has {len(outs)} tensors and lses {len(lses)}; expected one of each for every part, "
            "and at least one part"
        )
    if not is_dynamo_compiling():
        for name, parts in (("outs", outs), ("lses", lses)):
            for index, part in enumerate(parts):
                check_dense(**{f"{name}[{index}]": part})
        for name, tensor in (("sinks", sinks), ("out", out)):
            if tensor is not None:
                check_dense(**{name: tensor})
    first = outs[0]
    if sinks is not None and sinks.dtype not in (*DTYPES, torch.float64):
        raise InputError(f"sinks has dtype {sinks.dtype}; expected float32: use .float()")
    named = [
        *((f"outs[{index}]", part) for index, part in enumerate(outs)),
        *(() if out is None else (("out", out),)),
    ]
    for name, part in named:
        if part.shape != first.shape or part.dtype != first.dtype or part.device != first.device:
            raise InputError(
                f"{name} is {part.dtype} on {part.device} with shape {tuple(part.shape)}; expected {first.dtype} on "
                f"{first.device} with shape {tuple(first.shape)}, as outs[0]"
            )
    others = [(f"lses[{index}]", lse) for index, lse in enumerate(lses)]
    for name, tensor in [*others, *(() if sinks is None else (("sinks", sinks),))]:
        if tensor.device != first.device:
            raise InputError(
                f"{name} is on {tensor.device} but outs[0] is on {first.device}; expected one device: "
                "move it with .to()"
            )
    for index, lse in enumerate(lses):
        if lse.shape != first.shape[:-1]:
            raise InputError(
                f"lses[{index}] has shape {tuple(lse.shape)}; expected {tuple(first.shape[:-1])}, that of outs without "
                "their last dimension"
            )
    if sinks is not None and sinks.shape != first.shape[-2:-1]:
        raise InputError(
            f"sinks has shape {tuple(sinks.shape)}; expected ({first.shape[-2]},), one for each head"
        )
