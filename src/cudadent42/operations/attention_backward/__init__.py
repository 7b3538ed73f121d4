"""Attention's backward pass, as the lab sees it. Nothing here imports torch before it is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from cudadent42.base.toml import Table
from cudadent42.operations.attention import OPERATION as FORWARD
from cudadent42.operations.attention import needed_with_gradients
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.operations.attention_backward.case import AttentionBackwardCase
from cudadent42.operations.interface import Definition, Numerics, Parts

if TYPE_CHECKING:
    from cudadent42.model.implementations import Implementation, Prepare
    from cudadent42.operations.attention_backward.inputs import BackwardInputs
    from flashmoe_science.jit.nvrtc import CudaKernel

CaseT = TypeVar("CaseT", bound=AttentionBackwardCase)


def _cuda_kernels(architectures: Sequence[str]) -> list[CudaKernel]:
    """Of both passes: gradients are those of a result that the forward pass gave."""
    from cudadent42.operations.cuda_kernels import kernels_of
    from flashmoe_science.cuda.attention import gradients

    return [*FORWARD.cuda_kernels(architectures), *kernels_of(architectures, gradients.kernels)]


def definition(case_type: type[CaseT]) -> Definition[CaseT, BackwardInputs]:
    """Of an operation that gives the three gradients; shapes, columns and words are the forward pass's."""

    def parse_case(table: Table, name: str, dtype: str) -> CaseT:
        forward_case = FORWARD.parse_case(table, name, dtype)
        return case_type(**{field.name: getattr(forward_case, field.name) for field in fields(AttentionCase)})

    def implementations() -> tuple[Implementation, ...]:
        from cudadent42.operations.attention_backward.implementations import implementations

        return implementations(case_type.operation)

    def plug_in(function: Callable[..., Any]) -> Prepare:
        """A differentiable ``function(query, key, value, *, causal, softmax_scale)``."""
        from cudadent42.operations.attention_backward.implementations import prepare_with

        return prepare_with(case_type.operation, FORWARD.plug_in(function))

    def numerics() -> Numerics[CaseT, BackwardInputs]:
        from cudadent42.operations.attention_backward.numerics import NUMERICS

        return NUMERICS  # type: ignore[return-value]

    def without(case: CaseT, inputs: BackwardInputs) -> Parts:
        from cudadent42.operations.attention_backward.parts import without

        return without(case, inputs)

    return Definition(
        case_type=case_type,
        baseline="pytorch",
        case_keys=FORWARD.case_keys,
        parse_case=parse_case,
        columns=FORWARD.columns,
        cells=FORWARD.cells,
        shape=FORWARD.shape,
        shape_legend=FORWARD.shape_legend,
        implementations=implementations,
        plug_in=plug_in,
        numerics=numerics,
        unplanned=FORWARD.unplanned,  # type: ignore[arg-type]
        differentiates=True,
        cpu_kernels=("attention_backward", *FORWARD.cpu_kernels),
        cuda_kernels=_cuda_kernels,
        needed=needed_with_gradients,
        without=without,
    )


OPERATION = definition(AttentionBackwardCase)
