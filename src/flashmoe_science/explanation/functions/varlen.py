"""`attention_varlen`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashmoe_science.cuda.device import Device, device_of
from flashmoe_science.cuda.varlen.select import explained
from flashmoe_science.explanation.functions.attention import AMX_STEP
from flashmoe_science.explanation.record import Arguments, Explainable, Explanation, explained_on_cuda
from flashmoe_science.jit.host import InstructionSet
from flashmoe_science.varlen.arguments import Inputs, Options, check, check_sizes
from flashmoe_science.varlen.attention import attention_varlen
from flashmoe_science.varlen.problem import Problem, Sizes


def _asked(arguments: Arguments) -> tuple[torch.Tensor, Problem, Sizes]:
    """The queries, and what the call asks for. Raises InputError unless the arguments make sense."""
    inputs = Inputs(*(arguments[name] for name in Inputs._fields))
    options = Options(*(arguments[name] for name in Options._fields))
    problem = check(inputs, options)
    return inputs.query, problem, check_sizes(inputs, arguments["max_seqlen_q"], arguments["max_seqlen_k"])


def _check(arguments: Arguments) -> torch.Tensor:
    query, _, _ = _asked(arguments)
    return query


def _on_cuda(arguments: Arguments, gpu: Device | None) -> Explanation:
    query, problem, sizes = _asked(arguments)
    device = device_of(query.get_device()) if gpu is None else gpu
    choice, others = explained(problem, device, sizes, query.shape[0])
    return explained_on_cuda("attention_varlen", device, choice, others)


def _on_matrix_unit(arguments: Arguments) -> bool:
    """Keys of FP8 are widened to float32, and multiplied as such."""
    _, problem, _ = _asked(arguments)
    whole = problem.head_dim % AMX_STEP == 0 and problem.value_dim % AMX_STEP == 0
    return problem.dtype == torch.bfloat16 and problem.quantized is None and whole


def _further(arguments: Arguments, chosen: InstructionSet) -> Sequence[str]:
    _, problem, _ = _asked(arguments)
    return () if problem.quantized is None else ("a copy of the keys in float32",)


EXPLAINED = Explainable(
    function=attention_varlen,
    check=_check,
    on_cuda=_on_cuda,
    cpu_kernel=lambda arguments: "attention_varlen",
    on_matrix_unit=_on_matrix_unit,
    further=_further,
)
