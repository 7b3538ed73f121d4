"""The mixture-of-experts forward, as the lab sees it. Nothing here imports torch before it is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import Parameter, signature
from random import Random
from typing import TYPE_CHECKING, Any

from cudadent42.base.errors import UsageError
from cudadent42.base.toml import MAX_SIZE, Table, did_you_mean
from cudadent42.model.implementations import UnsupportedCaseError
from cudadent42.operations.interface import Configured, Definition, Numerics, other_size
from cudadent42.operations.moe.activations import ACTIVATIONS, W13_LAYOUTS
from cudadent42.operations.moe.case import MoeCase

if TYPE_CHECKING:
    from torch import Tensor

    from cudadent42.model.implementations import Call, Implementation
    from cudadent42.operations.moe.inputs import MoeInputs
    from flashmoe_science.cuda.choice import Tuned
    from flashmoe_science.cuda.device import Device
    from flashmoe_science.jit.nvrtc import CudaKernel

_SIZE_STEP = 16
QUANTIZED_KEYS = frozenset(("weight_bits", "group"))
"""Of a case in a suite; the backward pass has none, as such weights have no gradient."""
_GROUP, _GROUP_STEP = 128, 32
"""Weights that share a scale where the case does not say, and what divides their number."""
_ELEMENT_BF16 = {"bf16": 1, "fp16": 0}
"""The CUDA kernels' macro for the dtypes that they take."""
_NO_ACTIVATION = 0
"""Their macro for the second product; 1 and up are ``ACTIVATIONS``."""
_FUNCTIONS = "moe_"
"""How the names of the experts' CUDA kernels begin; those of the routing, which ``fused_moe`` does not call, do not."""


def _parse_case(table: Table, name: str, dtype: str) -> MoeCase:
    sizes = {key: table.integer(key, _SIZE_STEP, MAX_SIZE, None) for key in ("hidden", "intermediate")}
    for key, size in sizes.items():
        if size % _SIZE_STEP:
            raise UsageError(f"{table.where}: {key} = {size}; expected a multiple of {_SIZE_STEP}")
    experts = table.integer("experts", 1, MAX_SIZE, None)
    activation: str = table.value("activation", str, "the name of an activation", "silu")
    if activation not in ACTIVATIONS:
        raise UsageError(
            f"{table.where}: unknown activation {activation!r}; expected one of {', '.join(ACTIVATIONS)}"
            + did_you_mean(activation, ACTIVATIONS)
        )
    weight_bits, group = _weights(table, sizes)
    w13_layout: str = table.value("w13_layout", str, "the name of a layout", "concat")
    if w13_layout not in W13_LAYOUTS:
        raise UsageError(
            f"{table.where}: unknown w13_layout {w13_layout!r}; expected one of {', '.join(W13_LAYOUTS)}"
            + did_you_mean(w13_layout, W13_LAYOUTS)
        )
    bias: bool = table.value("bias", bool, "true or false", False)
    if weight_bits and bias:
        raise UsageError(
            f"{table.where}: bias beside weight_bits; quantised weights have none: expected either"
        )
    case = MoeCase(
        name=name,
        dtype=dtype,
        tokens=table.integer("tokens", 1, MAX_SIZE, None),
        hidden=sizes["hidden"],
        intermediate=sizes["intermediate"],
        experts=experts,
        top_k=table.integer("top_k", 1, experts, None),
        activation=activation,
        weight_bits=weight_bits,
        group=group,
        bias=bias,
        w13_layout=w13_layout,
    )
    if w13_layout != "concat" and not case.gated:
        raise UsageError(
            f"{table.where}: w13_layout = {w13_layout!r}, but {activation} has no gate; leave it out"
        )
    return case


def _weights(table: Table, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Bits of a weight and weights that share a scale; zeros for weights of the case's dtype."""
    weight_bits = table.integer("weight_bits", 0, 8, 0)
    if weight_bits not in (0, 4, 8):
        raise UsageError(f"{table.where}: weight_bits = {weight_bits}; expected 4 or 8, or none")
    group = table.integer("group", 0, MAX_SIZE, _GROUP if weight_bits else 0)
    if not weight_bits:
        if group:
            raise UsageError(f"{table.where}: group = {group} without weight_bits; expected both, or neither")
        return 0, 0
    if group < _GROUP_STEP or group % _GROUP_STEP or any(size % group for size in sizes.values()):
        raise UsageError(
            f"{table.where}: group = {group}; expected a multiple of {_GROUP_STEP} that divides hidden and intermediate"
        )
    return weight_bits, group


def _cells(case: MoeCase) -> Mapping[str, object]:
    return {
        "batch_size": 1,
        "seq_len": case.tokens,
        "hidden_dim": case.hidden,
        "num_heads": case.experts,
        "intermediate_dim": case.intermediate,
        "top_k": case.top_k,
        "activation": case.activation,
    }


def _shape(case: MoeCase) -> str:
    sizes = f"{case.tokens} × {case.hidden} × {case.intermediate}, {case.top_k} of {case.experts}"
    sizes += f" {case.activation}" if case.activation != "silu" else ""
    sizes += " interleaved" if case.w13_layout == "interleaved" else ""
    sizes += " biases" if case.bias else ""
    return sizes + (f", {case.weight_bits} bits in groups of {case.group}" if case.weight_bits else "")


def _shape_legend(cases: Sequence[MoeCase]) -> str:
    return "tokens × hidden × intermediate, chosen of all experts"


_MOST_HIDDEN_TOKENS = 512
"""Of shapes that are in no plan."""


def _unplanned(cases: Sequence[MoeCase], chance: Random, count: int) -> Sequence[MoeCase]:
    """Other numbers of tokens."""
    sizes = [each.tokens for each in cases]
    return [
        replace(
            chance.choice(cases),
            name=f"hidden-{number}",
            tokens=other_size(sizes, _MOST_HIDDEN_TOKENS, chance),
        )
        for number in range(count)
    ]


def _implementations() -> tuple[Implementation, ...]:
    from cudadent42.operations.moe.implementations import ALL

    return ALL


def _plug_in(function: Callable[..., Any]) -> Callable[[MoeCase, MoeInputs], Call]:
    """Called as ``function(hidden_states, w13, w2, topk_weights, topk_ids, *, activation)``, with ``w13_layout``,
    ``w13_bias`` and ``w2_bias`` besides where a case has them."""

    def prepare(case: MoeCase, inputs: MoeInputs) -> Call:
        tensors, activation, more = inputs.tensors, case.activation, inputs.options
        lacking = _not_taken(function, more)
        if lacking:
            raise UnsupportedCaseError(f"it has no argument {lacking[0]}, which this case needs")

        def call() -> Tensor:
            result: Tensor = function(*tensors, activation=activation, **more)
            return result

        return call

    return prepare


def _not_taken(function: Callable[..., Any], options: Mapping[str, object]) -> list[str]:
    """Keywords that a function does not have; none where it does not say."""
    if not options:
        return []
    try:
        parameters = signature(function).parameters
    except (TypeError, ValueError):
        return []
    if any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values()):
        return []
    return [name for name in options if name not in parameters]


def _cuda_kernels(architectures: Sequence[str]) -> list[CudaKernel]:
    from cudadent42.operations.cuda_kernels import kernels_of
    from flashmoe_science.cuda import moe

    return kernels_of(architectures, moe.kernels)


def _needed(kernels: Sequence[CudaKernel], cases: Sequence[MoeCase]) -> list[CudaKernel]:
    """The experts' own, of the cases' dtypes and activations, for ids of 32 bits as `inputs` makes them."""
    wanted = {
        "ELEMENT_BF16": {_ELEMENT_BF16[case.dtype] for case in cases if case.dtype in _ELEMENT_BF16},
        "ACTIVATION": {_NO_ACTIVATION, *(1 + ACTIVATIONS.index(case.activation) for case in cases)},
        "IDS64": {0},
    }
    if not wanted["ELEMENT_BF16"]:
        return []
    return [
        kernel
        for kernel in kernels
        if kernel.function.startswith(_FUNCTIONS)
        and all(kernel.macros.get(name, min(values)) in values for name, values in wanted.items())
    ]


def _configured(name: str, case: MoeCase, device: Device) -> Configured:
    from cudadent42.operations.moe.configured import configured

    return configured(name, case, device)


def _tuned() -> Tuned[Any]:
    from flashmoe_science.cuda.moe.select import TUNED

    return TUNED


def _numerics() -> Numerics[MoeCase, MoeInputs]:
    from cudadent42.operations.moe.numerics import NUMERICS

    return NUMERICS


OPERATION = Definition(
    case_type=MoeCase,
    baseline="grouped_mm",
    case_keys=frozenset(
        ("tokens", "hidden", "intermediate", "experts", "top_k", "activation", "bias", "w13_layout")
    )
    | QUANTIZED_KEYS,
    parse_case=_parse_case,
    columns=(
        *("implementation", "dtype", "batch_size", "seq_len", "hidden_dim", "num_heads", "latency_ms"),
        *("throughput_tokens_per_sec", "memory_mb", "case", "intermediate_dim", "top_k", "activation"),
        *("block", "seed", "position", "inner", "timestamp_s", "flags"),
    ),
    cells=_cells,
    shape=_shape,
    shape_legend=_shape_legend,
    implementations=_implementations,
    plug_in=_plug_in,
    function="fused_moe",
    cpu_kernels=("moe_forward",),
    cuda_kernels=_cuda_kernels,
    needed=_needed,
    configured=_configured,
    tuned=_tuned,
    numerics=_numerics,
    unplanned=_unplanned,
)
