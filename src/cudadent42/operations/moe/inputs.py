"""Hidden states, expert weights and routing for a case, reproducible from a seed and a name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cudadent42.base.seeds import derived_seed
from cudadent42.model.dtypes import DTYPES
from cudadent42.operations.moe.case import MoeCase
from cudadent42.operations.moe.quantized_weights import QuantizedWeights, quantized_weights

ROUTER_SKEW = 0.3
"""Standard deviation of the experts' popularity, in logits, beside 1 for the tokens' own preferences: the busiest of
128 experts, 8 chosen, gets two to three times the mean. Trained routers, which a loss pushes towards balance, are
alike."""


@dataclass(frozen=True)
class MoeInputs:
    """Arguments of ``flashmoe_science.fused_moe``."""

    hidden_states: Tensor
    """(tokens, hidden)."""
    w13: Tensor
    """(experts, 2 * intermediate, hidden): gate rows, then up rows; half as many where there is no gate."""
    w2: Tensor
    """(experts, hidden, intermediate)."""
    topk_weights: Tensor
    """(tokens, k), float32."""
    topk_ids: Tensor
    """(tokens, k), int32 or int64."""
    quantized: tuple[QuantizedWeights, QuantizedWeights] | None = None
    """w13 and w2, where the case's weights are quantised."""
    biases: tuple[Tensor, Tensor] | None = None
    """(experts, rows of w13) and (experts, hidden), of the weights' dtype."""
    w13_layout: str = "concat"
    """``interleaved``: gate rows and up rows by turns, and so their biases."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.hidden_states, self.w13, self.w2, self.topk_weights, self.topk_ids

    @property
    def biased(self) -> dict[str, Tensor]:
        """The biases by the names of arguments, where there are any."""
        return {} if self.biases is None else dict(zip(("w13_bias", "w2_bias"), self.biases, strict=True))

    @property
    def options(self) -> dict[str, Any]:
        """What `flashmoe_science.fused_moe` gets besides, where it is not as usual."""
        return {**self.biased, **({} if self.w13_layout == "concat" else {"w13_layout": self.w13_layout})}

    @property
    def result_like(self) -> Tensor:
        return self.hidden_states

    @property
    def buffer_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The output, and one row for each token and choice: intermediate values and results of the experts."""
        tokens, hidden = self.hidden_states.shape
        slots = self.topk_ids.numel()
        return (tokens, hidden), (slots, self.w2.shape[2]), (slots, hidden)


Popularity = Callable[[MoeCase, torch.Generator, str], Tensor]
"""(case, generator, device): what the experts' popularity adds to every token's logits, (experts,) float32."""


def skewed(case: MoeCase, generator: torch.Generator, device: str) -> Tensor:
    """As a trained router's."""
    return ROUTER_SKEW * torch.randn(case.experts, generator=generator, dtype=torch.float32, device=device)


def input_sets(
    case: MoeCase, seed: int, count: int, device: str, popularity_of: Popularity = skewed
) -> list[MoeInputs]:
    """Tokens and routing of their own for each set, the same experts for all, as between a model's calls.

    Hidden states are standard normal; weights are normal with the variance that makes both products' results of the
    order of 1, or numbers of few bits about as large; routing is that of a router with popular and less popular
    experts.
    """
    dtype = DTYPES[case.dtype]
    generator = _generator(seed, case, "weights", device)

    def weights(rows: int, columns: int) -> Tensor:
        made = torch.empty((case.experts, rows, columns), dtype=dtype, device=device)
        return made.normal_(0.0, columns**-0.5, generator=generator)

    shapes = ((2 if case.gated else 1) * case.intermediate, case.hidden), (case.hidden, case.intermediate)
    quantized = None
    if case.weight_bits:
        first, second = (quantized_weights(case, *shape, generator, device) for shape in shapes)
        quantized, w13, w2 = (first, second), first.wide, second.wide
    else:
        w13, w2 = (weights(*shape) for shape in shapes)
    popularity = popularity_of(case, generator, device)
    biases = _biases(case, seed, device) if case.bias else None
    return [
        replace(
            _tokens(case, seed, index, w13, w2, popularity),
            quantized=quantized,
            biases=biases,
            w13_layout=case.w13_layout,
        )
        for index in range(count)
    ]


def _biases(case: MoeCase, seed: int, device: str) -> tuple[Tensor, Tensor]:
    """Of the order of the products' results, so that one that is left out or at another place is seen; drawn apart from
    the weights, which are those of the case without biases."""
    generator = _generator(seed, case, "biases", device)
    rows = (2 if case.gated else 1) * case.intermediate
    first, second = (
        torch.empty((case.experts, count), dtype=DTYPES[case.dtype], device=device).normal_(
            0.0, 0.5, generator=generator
        )
        for count in (rows, case.hidden)
    )
    return first, second


def random_inputs(case: MoeCase, seed: int, device: str) -> MoeInputs:
    """The first set."""
    return input_sets(case, seed, 1, device)[0]


def refresh(
    case: MoeCase, inputs: MoeInputs, seed: int, popularity_of: Popularity = skewed
) -> tuple[Tensor, ...]:
    """Other tokens and another routing in the same memory; the experts stay, as a model's do."""
    device = str(inputs.w13.device)
    popularity = popularity_of(case, _generator(seed, case, "popularity", device), device)
    fresh = _tokens(case, seed, 0, inputs.w13, inputs.w2, popularity)
    written = inputs.hidden_states, inputs.topk_weights, inputs.topk_ids
    for tensor, values in zip(
        written, (fresh.hidden_states, fresh.topk_weights, fresh.topk_ids), strict=True
    ):
        tensor.copy_(values)
    return written


def _tokens(case: MoeCase, seed: int, index: int, w13: Tensor, w2: Tensor, popularity: Tensor) -> MoeInputs:
    device = str(w13.device)
    generator = _generator(seed, case, index, device)
    hidden_states = torch.randn(
        (case.tokens, case.hidden), generator=generator, dtype=torch.float32, device=device
    ).to(w13.dtype)
    logits = (
        torch.randn((case.tokens, case.experts), generator=generator, dtype=torch.float32, device=device)
        + popularity
    )
    chosen, ids = torch.topk(logits, case.top_k, dim=-1)
    return MoeInputs(hidden_states, w13, w2, torch.softmax(chosen, dim=-1), ids.to(torch.int32))


def _generator(seed: int, case: MoeCase, purpose: object, device: str) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(derived_seed(seed, case.id, purpose))
