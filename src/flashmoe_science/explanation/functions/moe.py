"""`fused_moe`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashmoe_science.cpu.moe_quantized import further_features
from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.moe.forward import asked
from flashmoe_science.cuda.moe.gradients import why_composed
from flashmoe_science.cuda.moe.select import FORWARD
from flashmoe_science.errors import DeviceError
from flashmoe_science.explanation.record import Arguments, Explainable, Explanation, explained_on_cuda
from flashmoe_science.jit.host import InstructionSet
from flashmoe_science.moe import fused_moe
from flashmoe_science.moe_arguments import Activation, W13Layout, check_moe_arguments, parse_choice
from flashmoe_science.quantized import BITS, NO_QUANTIZED_CUDA, both_scales, check_quantized_arguments

_TENSORS = ("hidden_states", "w13", "w2", "topk_weights", "topk_ids")
_COMPOSED = "PyTorch's operations, one expert after the other; not hopper: {}"


def _check(arguments: Arguments) -> torch.Tensor:
    activation = parse_choice(Activation, arguments["activation"], "activation")
    parse_choice(W13Layout, arguments["w13_layout"], "w13_layout")
    hidden_states, w13, w2, weights, ids = (arguments[name] for name in _TENSORS)
    scales = arguments["w13_scales"], arguments["w2_scales"]
    if scales[0] is None and scales[1] is None:
        biases = arguments["w13_bias"], arguments["w2_bias"]
        check_moe_arguments(hidden_states, w13, w2, weights, ids, activation, arguments["out"], *biases)
    else:
        check_quantized_arguments(
            hidden_states, w13, w2, weights, ids, *both_scales(*scales), activation, arguments["out"]
        )
    assert isinstance(hidden_states, torch.Tensor)
    return hidden_states


def _on_cuda(arguments: Arguments, gpu: Device | None) -> Explanation:
    activation = parse_choice(Activation, arguments["activation"], "activation")
    layout = parse_choice(W13Layout, arguments["w13_layout"], "w13_layout")
    if arguments["w13_scales"] is not None or arguments["w2_scales"] is not None:
        raise DeviceError(NO_QUANTIZED_CUDA)
    biases = tuple(name for name in ("w13_bias", "w2_bias") if arguments[name] is not None)
    hidden_states, w13, w2, weights, ids = (arguments[name] for name in _TENSORS)
    tensors = hidden_states, w13, w2, weights, ids
    problem, device = asked(tensors, activation, layout, gpu, (*_TENSORS, *biases))
    reason = why_composed(problem, device)
    choice = FORWARD.select(problem, device)
    others = FORWARD.others(problem, device, choice)
    composed = None if reason is None else _COMPOSED.format(reason)
    return explained_on_cuda("fused_moe", device, choice, others, composed)


def _on_matrix_unit(arguments: Arguments) -> bool:
    hidden_states: torch.Tensor = arguments["hidden_states"]
    return hidden_states.dtype == torch.bfloat16


def _further(arguments: Arguments, chosen: InstructionSet) -> Sequence[str]:
    return () if arguments["w13_scales"] is None else further_features(chosen, BITS[arguments["w13"].dtype])


EXPLAINED = Explainable(
    function=fused_moe,
    check=_check,
    on_cuda=_on_cuda,
    cpu_kernel=lambda arguments: "moe_forward",
    on_matrix_unit=_on_matrix_unit,
    further=_further,
)
