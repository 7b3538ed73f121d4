"""What sinks change of a backward pass, and their own gradient: on CUDA by a kernel, else composed of PyTorch's
operations.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch

from flashmoe_science.cuda.attention.gradients import sinks as cuda
from flashmoe_science.errors import KernelDefectError


class WithSinks(NamedTuple):
    """What the backward kernels get where there are sinks, and the sinks' gradient; None for what is not wanted."""

    grad_output: torch.Tensor
    """The one that was given, or a copy of it that kernels can read."""
    total: torch.Tensor | None
    """In the place of the log-sum-exp: log(exp(lse) + exp(sink)). Minus infinity for a row without keys."""
    grad_lse: torch.Tensor | None
    """In the place of its gradient: times exp(total - lse), as the log-sum-exp has no sink in it."""
    grad_sinks: torch.Tensor | None


def with_sinks(
    *,
    grad_output: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor,
    grad_lse: torch.Tensor | None,
    total: bool,
    of_sinks: bool,
) -> WithSinks:
    """A sink's gradient is the sum of -rowsum(output * grad_output) * exp(sink - total) over its head's rows. Rows
    without keys have none.

    Args:
        total: whether what the backward kernels get is wanted.
        of_sinks: whether the sinks' gradient is.
    """
    if cuda.takes(output):
        if of_sinks:
            output, grad_output = cuda.readable(output), cuda.readable(grad_output)
        try:
            results = cuda.with_sinks(
                grad_output, output, lse.contiguous(), sinks, grad_lse, total=total, of_sinks=of_sinks
            )
            return WithSinks(grad_output, *results)
        except KernelDefectError as defect:
            message = f"{defect}; composing what sinks change of PyTorch's operations"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
    return _composed(
        grad_output=grad_output,
        output=output,
        lse=lse,
        sinks=sinks.detach(),
        grad_lse=grad_lse,
        total=total,
        of_sinks=of_sinks,
    )


def _composed(
    *,
    grad_output: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor,
    grad_lse: torch.Tensor | None,
    total: bool,
    of_sinks: bool,
) -> WithSinks:
    logits = sinks[:, None]
    without_keys = lse == -torch.inf
    with_sink = torch.where(without_keys, lse, torch.logaddexp(lse, logits))
    grad_sinks = None
    if of_sinks:
        delta = (output.float() * grad_output).sum(-1)
        share = torch.where(without_keys, 0.0, (logits - with_sink).exp())
        grad_sinks = -(delta * share).sum((0, 2))
    if not total:
        return WithSinks(grad_output, None, None, grad_sinks)
    if grad_lse is not None:
        most = torch.finfo(torch.float32).max
        grad_lse = grad_lse * torch.where(without_keys, 0.0, (with_sink - lse).exp().clamp(max=most))
    return WithSinks(grad_output, with_sink, grad_lse, grad_sinks)
