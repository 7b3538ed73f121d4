"""`flash_attention`."""

from __future__ import annotations

import torch

from flashmoe_science.arguments import check_arguments, check_causal
from flashmoe_science.attention import flash_attention
from flashmoe_science.cuda.attention.forward import asked
from flashmoe_science.cuda.attention.select import FORWARD
from flashmoe_science.cuda.device import Device
from flashmoe_science.explanation.record import Arguments, Explainable, Explanation, explained_on_cuda

AMX_STEP = 32
"""Of dimensions that the matrix unit takes, as in amx.h."""


def _check(arguments: Arguments) -> torch.Tensor:
    query = arguments["query"]
    check_arguments(query, arguments["key"], arguments["value"], arguments["softmax_scale"])
    check_causal(arguments["causal"])
    assert isinstance(query, torch.Tensor)
    return query


def _on_cuda(arguments: Arguments, gpu: Device | None) -> Explanation:
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    causal, scale, lse = (arguments[name] for name in ("causal", "softmax_scale", "return_lse"))
    problem, device = asked(query, key, value, causal, scale, lse, gpu)
    choice = FORWARD.select(problem, device)
    return explained_on_cuda("flash_attention", device, choice, FORWARD.others(problem, device, choice))


def _on_matrix_unit(arguments: Arguments) -> bool:
    query: torch.Tensor = arguments["query"]
    return query.dtype == torch.bfloat16 and query.shape[-1] % AMX_STEP == 0


EXPLAINED = Explainable(
    function=flash_attention,
    check=_check,
    on_cuda=_on_cuda,
    cpu_kernel="attention_forward",
    on_matrix_unit=_on_matrix_unit,
)
