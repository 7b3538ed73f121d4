"""`flash_attention`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashmoe_science.arguments import check_arguments, check_causal
from flashmoe_science.attention import flash_attention
from flashmoe_science.cpu.library import features_besides
from flashmoe_science.cuda.attention.forward import asked
from flashmoe_science.cuda.attention.select import FORWARD
from flashmoe_science.cuda.device import Device, device_of
from flashmoe_science.cuda.varlen import dense as with_options
from flashmoe_science.explanation.record import Arguments, Explainable, Explanation, explained_on_cuda
from flashmoe_science.jit.host import InstructionSet
from flashmoe_science.varlen.dense import EVERYTHING
from flashmoe_science.varlen.dense_forward import check_sinks
from flashmoe_science.varlen.options import check_softcap, check_window

AMX_STEP = 32
"""Of dimensions that the matrix unit takes, as in amx.h."""


def _check(arguments: Arguments) -> torch.Tensor:
    query = arguments["query"]
    check_arguments(query, arguments["key"], arguments["value"], arguments["softmax_scale"])
    check_causal(arguments["causal"])
    check_window(arguments["window"])
    check_softcap(arguments["softcap"])
    if arguments["sinks"] is not None:
        check_sinks(arguments["sinks"], query)
    assert isinstance(query, torch.Tensor)
    return query


def _is_plain(arguments: Arguments) -> bool:
    """Without a window, a cap and sinks."""
    return (
        arguments["sinks"] is None and not arguments["softcap"] and tuple(arguments["window"]) == EVERYTHING
    )


def _on_cuda(arguments: Arguments, gpu: Device | None) -> Explanation:
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    causal, scale, lse = (arguments[name] for name in ("causal", "softmax_scale", "return_lse"))
    if not _is_plain(arguments):
        device = device_of(query.get_device()) if gpu is None else gpu
        left, right = arguments["window"]
        choice, others = with_options.explained(
            query,
            key,
            value,
            device,
            window=(left, 0 if causal else right),
            softcap=arguments["softcap"],
            with_sinks=arguments["sinks"] is not None,
        )
        return explained_on_cuda("flash_attention", device, choice, others)
    problem, device = asked(query, key, value, causal, scale, lse, gpu)
    choice = FORWARD.select(problem, device)
    return explained_on_cuda("flash_attention", device, choice, FORWARD.others(problem, device, choice))


def _on_matrix_unit(arguments: Arguments) -> bool:
    query: torch.Tensor = arguments["query"]
    return query.dtype == torch.bfloat16 and query.shape[-1] % AMX_STEP == 0


def _cpu_kernel(arguments: Arguments) -> str:
    return "attention_forward" if _is_plain(arguments) else "attention_varlen"


def _further(arguments: Arguments, chosen: InstructionSet) -> Sequence[str]:
    return features_besides(_cpu_kernel(arguments), chosen)


EXPLAINED = Explainable(
    function=flash_attention,
    check=_check,
    on_cuda=_on_cuda,
    cpu_kernel=_cpu_kernel,
    on_matrix_unit=_on_matrix_unit,
    further=_further,
)
