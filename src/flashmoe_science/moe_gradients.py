"""The backward pass of a mixture of experts, as each backend offers it to autograd."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from flashmoe_science.moe_arguments import Activation, W13Layout

SECOND_DERIVATIVES = (
    "fused_moe has first derivatives only; where second ones are needed, compose the layer of PyTorch's "
    "operations, such as torch.nn.functional.linear for each expert"
)
"""What who differentiates the backward pass is told."""


class MoeTensors(NamedTuple):
    """What a call of `flashmoe_science.fused_moe` was given."""

    hidden_states: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None

    @property
    def five(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Those that every call has."""
        return self[:5]

    def contiguous(self) -> MoeTensors:
        """What hooks saved and restored need not have the forward's strides."""
        return MoeTensors(*(None if tensor is None else tensor.contiguous() for tensor in self))  # type: ignore[arg-type]


class MoeNeeds(NamedTuple):
    """Which gradients are needed: at least one."""

    hidden_states: bool
    w13: bool
    w2: bool
    topk_weights: bool
    w13_bias: bool = False
    w2_bias: bool = False


class MoeGradients(NamedTuple):
    """A gradient each; None for one that is not needed."""

    hidden_states: torch.Tensor | None
    w13: torch.Tensor | None
    w2: torch.Tensor | None
    topk_weights: torch.Tensor | None
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None


class MainGradients(NamedTuple):
    """Buffers of float32, contiguous and like the weights in shape, to which the weights' gradients are added."""

    w13: torch.Tensor | None = None
    w2: torch.Tensor | None = None

    def take(self, gradients: MoeGradients) -> MoeGradients:
        """Add those of the weights that have a buffer, and leave them out. They were rounded to the weights' dtype."""
        left: dict[str, None] = {}
        for name, buffer, gradient in (("w13", self.w13, gradients.w13), ("w2", self.w2, gradients.w2)):
            if buffer is not None and gradient is not None:
                buffer.add_(gradient)
                left[name] = None
        return gradients._replace(**left)


NO_MAIN_GRADIENTS = MainGradients()


class MoeTrainingForward(Protocol):
    """`flashmoe_science.fused_moe` that keeps z for the backward pass.

    A slot is a token and one of its choices: slot = token * k + j. *Sorted order* is that of the slots with valid ids
    by expert, and ascending within an expert. It follows from topk_ids alone, so it is made anew in the backward pass
    and not kept.

    z holds the products with w13, with w13_bias, before the activation, rounded to the tensors' dtype: row r is of the
    r-th slot in sorted order. The order of its columns is the backend's own: that of w13's rows on the CPU, all gates
    and then all ups on CUDA. Rows behind the last valid slot hold anything.
    """

    def __call__(
        self, tensors: MoeTensors, *, activation: Activation, w13_layout: W13Layout, keep_z: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output as without a backward pass, and z of shape (tokens * k, rows of w13).

        None in place of z if it is not to be kept, or if the backend cannot (`MoeBackend.keeps_z`).
        """
        ...


class MoeBackward(Protocol):
    """The gradients of `flashmoe_science.fused_moe`: `MoeBackend.backward`. Autograd calls nothing else of it.

    For a slot with expert e, weight s and incoming gradient g (its token's row of grad_output) let z = w13[e] x +
    w13_bias[e], y = act(z), d = w2[e]^T g and dz = act'(z) * (s * d). Then the gradients are sums over slots: x takes
    w13[e]^T dz, w13[e] takes dz x^T, w2[e] takes g (s * y)^T, w13_bias[e] takes dz and w2_bias[e] takes s * g. That of
    the weight s is <d, y> + <g, w2_bias[e]>: neither the expert's result nor anything else of the size (slots, hidden)
    was kept. Order of the products: what hidden_states needs first.

    What it may rely on: the tensors passed the forward's checks and are contiguous, but grad_output may have any
    strides (0 among them). z is the forward's, or None: then it computes z again. It is called under no_grad, in
    autograd's own thread or another, by several threads at a time.

    What it owes: the same bits in every call; zeros for weights of an expert without slots, for a token without a valid
    id and for the weight of an id that is no expert. No gradient has anything of a token or an expert that it does not
    depend on, NaN and infinity included. Second derivatives are not its business.

    Reference: Guo et al., SonicMoE (2025), arXiv:2512.14080, for what is kept and for the gradient of the weights.
    """

    def __call__(
        self,
        grad_output: torch.Tensor,
        tensors: MoeTensors,
        z: torch.Tensor | None,
        *,
        activation: Activation,
        w13_layout: W13Layout,
        needs: MoeNeeds,
        main: MainGradients = NO_MAIN_GRADIENTS,
    ) -> MoeGradients:
        """New contiguous tensors like those they are the gradients of: topk_weights' is float32.

        Args:
            grad_output: (tokens, hidden), like hidden_states in dtype.
            tensors, activation, w13_layout: as the forward took them.
            z: (tokens * k, rows of w13), in sorted order (`MoeTrainingForward`), or None.
            needs: what is not needed is not computed.
            main: where gradients of weights are added in place of being returned.
        """
        ...


class MoeBackend(Protocol):
    """The mixture of experts of a device: the modules ``cpu.moe_training`` and ``cuda.moe.training``."""

    def keeps_z(
        self,
        hidden_states: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        activation: Activation,
        w13_layout: W13Layout,
    ) -> bool:
        """Whether `forward` returns z of tensors like these when asked to; otherwise the backward pass computes it
        again. From shapes, types and the device alone: tensors may be fake.
        """
        ...

    @property
    def forward(self) -> MoeTrainingForward: ...

    @property
    def backward(self) -> MoeBackward: ...
