"""The backward pass of a mixture of experts, as the lab sees it. Nothing here imports torch before it is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from cudadent42.base.errors import UsageError
from cudadent42.base.toml import Table, did_you_mean
from cudadent42.operations.interface import Definition, Numerics, Parts, columns_with
from cudadent42.operations.moe import OPERATION as FORWARD
from cudadent42.operations.moe import QUANTIZED_KEYS
from cudadent42.operations.moe.case import MoeCase
from cudadent42.operations.moe_backward.case import ROUTINGS, MoeBackwardCase

if TYPE_CHECKING:
    from cudadent42.model.implementations import Implementation, Prepare
    from cudadent42.operations.moe_backward.inputs import MoeGradientInputs
    from flashmoe_science.jit.nvrtc import CudaKernel

CaseT = TypeVar("CaseT", bound=MoeBackwardCase)


def _cuda_kernels(architectures: Sequence[str]) -> list[CudaKernel]:
    """Of both passes: gradients are those of a result that the forward pass gave."""
    from cudadent42.operations.cuda_kernels import kernels_of
    from flashmoe_science.cuda.moe import gradients

    return [*FORWARD.cuda_kernels(architectures), *kernels_of(architectures, gradients.kernels)]


def definition(case_type: type[CaseT]) -> Definition[CaseT, MoeGradientInputs]:
    """Of an operation that gives the gradients; sizes and words are the forward pass's, and the routing."""

    def parse_case(table: Table, name: str, dtype: str) -> CaseT:
        routing: str = table.value("routing", str, "the name of a routing", "router")
        if routing not in ROUTINGS:
            raise UsageError(
                f"{table.where}: unknown routing {routing!r}; expected one of {', '.join(ROUTINGS)}"
                + did_you_mean(routing, ROUTINGS)
            )
        forward_case = FORWARD.parse_case(table, name, dtype)
        sizes = {field.name: getattr(forward_case, field.name) for field in fields(MoeCase)}
        return case_type(**sizes, routing=routing)

    def cells(case: CaseT) -> Mapping[str, object]:
        return {**FORWARD.cells(case), "routing": case.routing}

    def shape(case: CaseT) -> str:
        return FORWARD.shape(case) + (f" {case.routing}" if case.routing != "router" else "")

    def implementations() -> tuple[Implementation, ...]:
        from cudadent42.operations.moe_backward.implementations import implementations

        return implementations(case_type.operation)

    def plug_in(function: Callable[..., Any]) -> Prepare:
        """A differentiable ``function(hidden_states, w13, w2, topk_weights, topk_ids, *, activation)``, with the
        keywords of biases and layout where a case has them."""
        from cudadent42.operations.moe_backward.implementations import prepare_with

        return prepare_with(case_type.operation, FORWARD.plug_in(function))

    def numerics() -> Numerics[CaseT, MoeGradientInputs]:
        from cudadent42.operations.moe_backward.numerics import NUMERICS

        return NUMERICS  # type: ignore[return-value]

    def without(case: CaseT, inputs: MoeGradientInputs) -> Parts:
        from cudadent42.operations.moe_backward.parts import without

        return without(case, inputs)

    return Definition(
        case_type=case_type,
        baseline=FORWARD.baseline,
        case_keys=FORWARD.case_keys - QUANTIZED_KEYS | {"routing"},
        parse_case=parse_case,
        columns=columns_with("intermediate_dim", "top_k", "activation", "routing"),
        cells=cells,
        shape=shape,
        shape_legend=FORWARD.shape_legend,
        implementations=implementations,
        plug_in=plug_in,
        numerics=numerics,
        unplanned=FORWARD.unplanned,  # type: ignore[arg-type]
        differentiates=True,
        cpu_kernels=("moe_backward", *FORWARD.cpu_kernels),
        cuda_kernels=_cuda_kernels,
        needed=FORWARD.needed,
        without=without,
    )


OPERATION = definition(MoeBackwardCase)
