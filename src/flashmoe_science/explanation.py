"""Which kernel and configuration a call takes, and why not another."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flashmoe_science.arguments import check_arguments, check_causal
from flashmoe_science.attention import flash_attention
from flashmoe_science.cpu.moe_quantized import further_features
from flashmoe_science.cuda.attention.forward import asked as asked_of_attention
from flashmoe_science.cuda.attention.select import FORWARD as ATTENTION
from flashmoe_science.cuda.choice import Selection
from flashmoe_science.cuda.device import GPUS, Device
from flashmoe_science.cuda.moe.forward import asked as asked_of_moe
from flashmoe_science.cuda.moe.gradients import why_composed
from flashmoe_science.cuda.moe.select import FORWARD as MOE
from flashmoe_science.errors import DeviceError, InputError
from flashmoe_science.jit import host
from flashmoe_science.moe import fused_moe
from flashmoe_science.moe_arguments import Activation, W13Layout, check_moe_arguments, parse_choice
from flashmoe_science.quantized import BITS, NO_QUANTIZED_CUDA, both_scales, check_quantized_arguments


@dataclass(frozen=True)
class Explanation:
    """What a call takes. `str()` gives it as a few lines."""

    operation: str
    device: str
    """``cpu``, or the GPU and its architecture."""
    kernel: str
    configuration: Any
    """A frozen record of the kernel's own, or on a CPU the name of the instruction set."""
    reason: str
    others: tuple[tuple[str, str], ...]
    """Each other kernel (on a CPU: instruction set), and why it is not taken."""
    gradients: str | None = None
    """What computes the backward pass, where it is not a kernel."""

    def __str__(self) -> str:
        lines = [
            f"{self.operation} on {self.device}: {self.kernel}, {self.reason}",
            f"  {self.configuration}",
        ]
        lines += [f"  not {name}: {reason}" for name, reason in self.others]
        return "\n".join(lines if self.gradients is None else [*lines, f"  gradients: {self.gradients}"])


def explain(
    function: Callable[..., Any], *tensors: torch.Tensor, gpu: str | None = None, **options: Any
) -> Explanation:
    """Which kernel and configuration a call of `flash_attention` or `fused_moe` takes, and why not another.

    ``explain(flash_attention, query, key, value, causal=True)`` explains that call. It launches and compiles nothing,
    so that the tensors may be on ``meta``.

    Args:
        function: `flash_attention` or `fused_moe`.
        tensors, options: its arguments.
        gpu: answer for this GPU, which need not be there: T4, A100, A10, L4, L40S, RTX 4090, H100, H200 or B200. The
            tensors' own device unless given.

    Raises:
        InputError: arguments that the function refuses, or a GPU that is not in the list.
        DeviceError: no kernel takes the call.
    """
    function = inspect.unwrap(function)  # of one that stands in its place, as a recorder's does
    if function not in _OPERATIONS:
        raise InputError(
            f"there is nothing to explain about {getattr(function, '__name__', function)!r}; "
            "expected flash_attention or fused_moe"
        )
    try:
        bound = inspect.signature(function).bind(*tensors, **options)
    except TypeError as error:
        raise InputError(f"{function.__name__} cannot be called so: {error}") from error
    bound.apply_defaults()
    arguments = bound.arguments
    device = None if gpu is None else _named(gpu)
    first = next(iter(arguments.values()))
    if device is None and not (isinstance(first, torch.Tensor) and first.is_cuda):
        return _on_cpu(function.__name__, _OPERATIONS[function].check(arguments), arguments)
    return _OPERATIONS[function].on_cuda(arguments, device)


def _attention_on_cuda(arguments: dict[str, Any], gpu: Device | None) -> Explanation:
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    causal, scale, lse = (arguments[name] for name in ("causal", "softmax_scale", "return_lse"))
    problem, device = asked_of_attention(query, key, value, causal, scale, lse, gpu)
    return _on_cuda("flash_attention", ATTENTION, problem, device)


def _moe_on_cuda(arguments: dict[str, Any], gpu: Device | None) -> Explanation:
    activation = parse_choice(Activation, arguments["activation"], "activation")
    layout = parse_choice(W13Layout, arguments["w13_layout"], "w13_layout")
    if arguments["w13_scales"] is not None or arguments["w2_scales"] is not None:
        raise DeviceError(NO_QUANTIZED_CUDA)
    biases = tuple(name for name in ("w13_bias", "w2_bias") if arguments[name] is not None)
    tensors = tuple(arguments[name] for name in _MOE_TENSORS)
    problem, device = asked_of_moe(tensors, activation, layout, gpu, (*_MOE_TENSORS, *biases))
    reason = why_composed(problem, device)
    return _on_cuda("fused_moe", MOE, problem, device, None if reason is None else _COMPOSED.format(reason))


def _on_cuda(
    operation: str, selection: Selection[Any], problem: Any, device: Device, gradients: str | None = None
) -> Explanation:
    choice = selection.select(problem, device)
    others = selection.others(problem, device, choice)
    return Explanation(
        operation=operation,
        device=f"{device.architecture} with {device.multiprocessors} multiprocessors",
        kernel=choice.kernel.value,
        configuration=choice.configuration,
        reason=choice.reason,
        others=tuple((other.kernel.value, other.reason) for other in others),
        gradients=gradients,
    )


def _check_attention(arguments: dict[str, Any]) -> torch.Tensor:
    query = arguments["query"]
    check_arguments(query, arguments["key"], arguments["value"], arguments["softmax_scale"])
    check_causal(arguments["causal"])
    assert isinstance(query, torch.Tensor)
    return query


def _check_moe(arguments: dict[str, Any]) -> torch.Tensor:
    activation = parse_choice(Activation, arguments["activation"], "activation")
    parse_choice(W13Layout, arguments["w13_layout"], "w13_layout")
    hidden_states, w13, w2, weights, ids = (arguments[name] for name in _MOE_TENSORS)
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


def _on_cpu(operation: str, tensor: torch.Tensor, arguments: dict[str, Any]) -> Explanation:
    if not tensor.is_cpu:
        raise InputError(
            f"the tensors are on {tensor.device}, which has no kernels; name a GPU, as in gpu='H200', or move them"
        )
    chosen = host.choose_instruction_set()
    available = host.available_instruction_sets()
    others = []
    for other in host.InstructionSet:
        if other is chosen:
            continue
        if missing := host.missing_for(other):
            others.append((other.value, f"the CPU lacks {', '.join(missing)}"))
        elif chosen is available[0]:
            others.append((other.value, f"the CPU has it, and {chosen.value} is faster"))
        else:
            others.append((other.value, f"{host.INSTRUCTION_SET_VARIABLE} asks for {chosen.value}"))
    reason = "the best that this CPU runs"
    if chosen is not available[0]:
        reason = f"as {host.INSTRUCTION_SET_VARIABLE} asks"
    if chosen is host.InstructionSet.AMX:
        whole = operation != "flash_attention" or tensor.shape[-1] % 32 == 0  # AMX_STEP of amx.h
        multiplies = tensor.dtype == torch.bfloat16 and whole
        unit = "with its matrix unit where there are rows enough" if multiplies else "without its matrix unit"
        reason = f"{reason}, {unit}"
    if arguments.get("w13_scales") is not None:
        further = further_features(chosen, BITS[arguments["w13"].dtype])
        reason = ", with ".join((reason, *further))
    return Explanation(
        operation=operation,
        device="cpu",
        kernel=_CPU_KERNELS[operation],
        configuration=chosen.value,
        reason=reason,
        others=tuple(others),
    )


def _named(gpu: str) -> Device:
    by_name = {name.upper(): device for name, device in GPUS.items()}
    if gpu.upper() not in by_name:
        raise InputError(f"gpu is {gpu!r}; expected one of {', '.join(GPUS)}")
    return by_name[gpu.upper()]


@dataclass(frozen=True)
class _Operation:
    check: Callable[[dict[str, Any]], torch.Tensor]
    """Raises InputError unless the arguments make sense; gives the first tensor."""
    on_cuda: Callable[[dict[str, Any], Device | None], Explanation]


_MOE_TENSORS = ("hidden_states", "w13", "w2", "topk_weights", "topk_ids")
_CPU_KERNELS = {"flash_attention": "attention_forward", "fused_moe": "moe_forward"}
_COMPOSED = "PyTorch's operations, one expert after the other; not hopper: {}"
_OPERATIONS: dict[Callable[..., Any], _Operation] = {
    inspect.unwrap(flash_attention): _Operation(_check_attention, _attention_on_cuda),
    inspect.unwrap(fused_moe): _Operation(_check_moe, _moe_on_cuda),
}
