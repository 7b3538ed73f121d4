"""For tests of mixture of experts on a GPU: routings, tensors with guards around them, and what is right."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from moe_reference import ACTIVATIONS, factor_of

from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import device_of
from flashmoe_science.cuda.driver import make_context_current
from flashmoe_science.cuda.moe.problem import MoeProblem
from flashmoe_science.cuda.moe.select import module
from flashmoe_science.moe_arguments import Activation, W13Layout

_NAN = 0x7FA57FA5
"""Two NaNs in float16 and in bfloat16; as an int32, an index far out of range."""
_GUARD_ROWS = 5


@dataclass(frozen=True)
class Layer:
    """The tensors of one call."""

    problem: MoeProblem
    hidden_states: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None

    def addresses(self) -> tuple[int, ...]:
        """As a launch takes them."""
        given = (self.hidden_states, self.w13, self.w2, self.topk_weights, self.topk_ids)
        biases = (each for each in (self.w13_bias, self.w2_bias) if each is not None)
        return tuple(tensor.data_ptr() for tensor in (*given, *biases))

    def to(self, device: str) -> Layer:
        names = ("hidden_states", "w13", "w2", "topk_weights", "topk_ids", "w13_bias", "w2_bias")
        tensors = {name: getattr(self, name) for name in names}
        return replace(
            self, **{name: tensor.to(device) for name, tensor in tensors.items() if tensor is not None}
        )


def random_ids(tokens: int, top_k: int, experts: int) -> torch.Tensor:
    """(tokens, top_k) int32: different experts for each token."""
    return torch.rand(tokens, experts, device="cuda").argsort(dim=1)[:, :top_k].int().contiguous()


def layer(
    tokens: int,
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    activation: Activation = Activation.SILU,
    w13_layout: W13Layout = W13Layout.CONCAT,
    ids: torch.Tensor | None = None,
    biased: bool = False,
) -> Layer:
    """Random tensors; NaN follows each of the weights, their biases and the hidden states in memory."""
    topk_ids = random_ids(tokens, top_k, experts) if ids is None else ids.to("cuda")
    problem = MoeProblem(
        tokens=tokens,
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        top_k=top_k,
        dtype=dtype,
        activation=activation,
        w13_layout=w13_layout,
        ids64=topk_ids.dtype == torch.int64,
        w13_biased=biased,
        w2_biased=biased,
    )

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        whole = torch.full((shape[0] + 1, *shape[1:]), torch.nan, dtype=dtype, device="cuda")
        whole[:-1].normal_(std=scale)
        return whole[:-1]

    return Layer(
        problem,
        normal(tokens, hidden),
        normal(experts, problem.w13_rows, hidden, scale=hidden**-0.5),
        normal(experts, hidden, intermediate, scale=intermediate**-0.5),
        torch.rand(tokens, top_k, device="cuda").softmax(dim=1),
        topk_ids,
        normal(experts, problem.w13_rows) if biased else None,
        normal(experts, hidden) if biased else None,
    )


def reference(given: Layer, dtype: torch.dtype) -> torch.Tensor:
    """The layer by its definition, one expert at a time, in `dtype`; combined in float64."""
    problem = given.problem
    out = torch.zeros(problem.tokens, problem.hidden, dtype=torch.float64, device=given.hidden_states.device)
    for expert in range(problem.experts):
        token, j = (given.topk_ids == expert).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        sums = given.hidden_states[token].to(dtype) @ given.w13[expert].to(dtype).T
        if given.w13_bias is not None:
            sums = sums + given.w13_bias[expert].to(dtype)
        rows = activated(sums, problem) @ given.w2[expert].to(dtype).T
        if given.w2_bias is not None:
            rows = rows + given.w2_bias[expert].to(dtype)
        out.index_add_(0, token, rows.double() * given.topk_weights[token, j, None].double())
    return out


def activated(sums: torch.Tensor, problem: MoeProblem) -> torch.Tensor:
    function = ACTIVATIONS[problem.activation]
    if not problem.gated:
        return function(sums)
    interleaved = problem.w13_layout is W13Layout.INTERLEAVED
    gate, up = (sums[:, 0::2], sums[:, 1::2]) if interleaved else sums.chunk(2, dim=1)
    return function(gate) * factor_of(up, problem.activation)


def run_guarded(choice: Choice, given: Layer) -> torch.Tensor:
    """One call in the way of `choice`, with a workspace full of NaN; fails if it writes around its tensors."""
    problem, where = given.problem, device_of(torch.cuda.current_device())
    make_context_current(where.index)
    plan = module(choice.kernel).plan(problem, choice.configuration, where)
    whole = torch.full(
        (problem.tokens + 2 * _GUARD_ROWS, problem.hidden // 2), _NAN, dtype=torch.int32, device="cuda"
    )
    out = whole.view(problem.dtype)[_GUARD_ROWS:-_GUARD_ROWS]
    words = -(-plan.workspace_bytes // 4)
    guard = 256
    memory = torch.full((words + 2 * guard,), _NAN, dtype=torch.int32, device="cuda")
    workspace = memory[guard : guard + words]
    plan.launch(
        *given.addresses(), out.data_ptr(), workspace.data_ptr(), torch.cuda.current_stream().cuda_stream
    )
    result = out.clone()
    for around in (whole[:_GUARD_ROWS], whole[-_GUARD_ROWS:], memory[:guard], memory[-guard:]):
        assert (around == _NAN).all(), f"{choice}: written outside of its tensors"
    return result


def assert_right(given: Layer, choices: list[Choice], *, against: str = "cuda") -> None:
    """Every choice is right: its error against float64 is within twice that of PyTorch's products in the same dtype,
    and a rounding. Both are computed on the device `against`.
    """
    assert choices, "nothing takes this"
    there = given.to(against)
    exact = reference(there, torch.float64).cuda()
    plain = reference(there, given.problem.dtype).cuda()
    rounding = (exact.to(given.problem.dtype).double() - exact).abs().max().item()
    allowed = 2 * ((plain - exact).abs().max().item() + rounding) if exact.numel() else 0.0
    for choice in choices:
        out = run_guarded(choice, given).double()
        error = (out - exact).abs().max().item() if exact.numel() else 0.0
        assert error <= allowed, f"{choice}: error {error:.2e}, allowed {allowed:.2e}"
        # In the mean too: a wrong row among many must not hide behind the worst of the others.
        if exact.numel():
            mean = (out - exact).abs().mean().item()
            usual = 2 * ((plain - exact).abs().mean().item() + rounding / 8)
            assert mean <= usual, f"{choice}: mean error {mean:.2e}, allowed {usual:.2e}"
