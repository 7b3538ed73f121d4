"""`topk_routing`."""

from __future__ import annotations

import torch

from flashmoe_science.cuda.device import Device, device_of
from flashmoe_science.cuda.moe.topk import choose
from flashmoe_science.explanation.record import Arguments, Explainable, Explanation, explained_on_cuda
from flashmoe_science.moe import topk_routing
from flashmoe_science.moe_arguments import Scores, check_topk_arguments, parse_choice

_GRADIENTS = "PyTorch's operations"


def _check(arguments: Arguments) -> torch.Tensor:
    logits = arguments["logits"]
    parse_choice(Scores, arguments["scores"], "scores")
    names = ("k", "renormalize", "correction_bias", "scaling_factor", "groups", "top_groups")
    check_topk_arguments(logits, *(arguments[name] for name in names))
    assert isinstance(logits, torch.Tensor)
    return logits


def _on_cuda(arguments: Arguments, gpu: Device | None) -> Explanation:
    logits = _check(arguments)
    device = device_of(logits.get_device()) if gpu is None else gpu
    choice = choose(logits, arguments["groups"], device)
    return explained_on_cuda("topk_routing", device, choice, (), _GRADIENTS)


EXPLAINED = Explainable(
    function=topk_routing,
    check=_check,
    on_cuda=_on_cuda,
    cpu_kernel=lambda arguments: "topk_routing",
    on_matrix_unit=None,
)
