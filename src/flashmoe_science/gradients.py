"""The backward pass of attention, as each backend offers it to autograd."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Of query, key and value; None for one that is not needed."""

SECOND_DERIVATIVES = (
    "flash_attention has first derivatives only; where second ones are needed, call PyTorch's "
    "scaled_dot_product_attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH). "
    "Its is_causal aligns top-left: of unequal lengths give the mask as attn_mask"
)
"""What who differentiates the backward pass is told."""
SECOND_DERIVATIVES_OF_OPTIONS = (
    "flash_attention with a window, softcap or sinks has first derivatives only; where second ones are needed, compose "
    "it of PyTorch's matmul and softmax. scaled_dot_product_attention has no softcap and no sinks"
)


def with_contiguous_rows(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What hooks saved and restored need not have the forward's strides: copies where rows are not contiguous."""
    return tuple(
        tensor if tensor.numel() == 0 or tensor.stride(3) == 1 else tensor.contiguous() for tensor in tensors
    )


class Needs(NamedTuple):
    """Which gradients are needed: at least one."""

    query: bool
    key: bool
    value: bool


class Backward(Protocol):
    """The gradients of query, key and value: `Backend.backward`. Autograd calls nothing else of the backward pass.

    Let S = softmax_scale * query @ key^T, P = exp(S - lse), Δ = rowsum(output * grad_output) - grad_lse and dS = P *
    (grad_output @ value^T - Δ). Then the gradients are softmax_scale * dS @ key for query, softmax_scale * dS^T @
    query for key and P^T @ grad_output for value. The last two are sums over the query heads that share the head.

    What it may rely on: query, key and value passed the forward's checks, and output and lse are the forward's results
    for them. grad_output may have any strides (0 among them, and a last one that is not 1): a kernel that does not take
    them copies it once. It is called under no_grad, in autograd's own thread or another, by several threads at a time.

    What it owes: gradients that have the same bits in every call, and exact zeros for a row that sees no key (lse is
    minus infinity, output zero) and for a key that no row sees. No gradient has anything of a masked key or row, NaN
    and infinity included. The kernels for Hopper owe that of other tiles alone: within one they multiply what is hidden
    by a weight of zero. It takes no memory of seqlen_q * seqlen_k and does not wait for the device. Second derivatives
    are not its business.

    Reference: Dao et al., FlashAttention (2022), arXiv:2205.14135, algorithm 4.
    """

    def __call__(
        self,
        grad_output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        grad_lse: torch.Tensor | None,
        *,
        causal: bool,
        softmax_scale: float | None,
        needs: Needs,
    ) -> Gradients:
        """One launch, or a few, on the current stream.

        Args:
            grad_output: like output in shape and dtype.
            query, key, value, causal, softmax_scale: as the forward took them; causal is a Python bool.
            output, lse: what the forward returned: output with its strides; lse natural, float32, contiguous
                (batch, heads, seqlen_q).
            grad_lse: float32, (batch, heads, seqlen_q), any strides; None if lse is not differentiated.
            needs: what is not needed is not returned. The CPU's kernels do not compute it; those for a GPU that make
                several gradients in one pass compute it all the same, and do not write it.

        Returns:
            New tensors, like query, key and value in shape and dtype, with the strides of ``torch.empty_like`` where
            its rows are contiguous, else contiguous.
        """
        ...


class Forward(Protocol):
    """Attention itself, as `flashmoe_science.flash_attention` says."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        causal: bool,
        softmax_scale: float | None,
        return_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output and, with ``return_lse``, the log-sum-exp, else None."""
        ...


class Backend(Protocol):
    """The attention of a device: the modules ``cpu.attention`` and ``cuda.attention`` of this package."""

    @property
    def forward(self) -> Forward: ...

    @property
    def backward(self) -> Backward | None:
        """None while the device has no kernel for it: calls that require a gradient are then refused."""
        ...
