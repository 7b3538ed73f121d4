"""What an operation tells the lab. Planning, timing, comparing and reporting know no operation but through this.

`Definition` is what planning, recording and reporting need, and imports no torch; `Numerics` is what verifying and
timing need, and does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from cudadent42.model.cases import Case, Operation

if TYPE_CHECKING:
    from torch import Tensor

    from cudadent42.base.toml import Table
    from cudadent42.model.implementations import Implementation, Prepare
    from flashmoe_science.jit.nvrtc import CudaKernel

CaseT = TypeVar("CaseT", bound=Case)
InputsT = TypeVar("InputsT", bound="Inputs")

OnChunk = Callable[[], None]
"""Told from time to time that a computation which can take minutes goes on."""


class Inputs(Protocol):
    """The tensors of one call."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those that the call is given; it must not change them."""

    @property
    def result_like(self) -> Tensor:
        """A tensor with the shape, dtype and device of the result."""

    @property
    def buffer_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the result and of scratch memory, in the result's dtype, that an implementation is likely to allocate.
        They are handed out full of NaN when it is verified."""


@dataclass(frozen=True)
class HardInput:
    """One adversarial input."""

    kind: str
    case: Case
    make: Callable[[int, str], Inputs]
    """From a seed and a device."""


@dataclass(frozen=True)
class Numerics(Generic[CaseT, InputsT]):
    """An operation's inputs, and what is right for them."""

    input_sets: Callable[[CaseT, int, int, str], list[InputsT]]
    """(case, seed, count, device): random inputs, reproducible; the first is the same for any count."""
    hard_inputs: Callable[[str], tuple[HardInput, ...]]
    """Adversarial inputs for a dtype."""
    hard_cases: Callable[[Sequence[CaseT], str], tuple[HardInput, ...]]
    """(cases, device): adversarial values at shapes that will be timed: a small one may be served by another kernel."""
    float64: Callable[[CaseT, InputsT, OnChunk], Tensor]
    """The result in float64."""
    pytorch: Callable[[CaseT, InputsT], Tensor]
    """PyTorch's result in the case's dtype: its error is the measure for everybody's."""
    pytorch_plain: Callable[[CaseT, InputsT], Tensor]
    """The same by plain operations, for where a fused one of PyTorch's gives NaN and float64 does not."""


@dataclass(frozen=True)
class Definition(Generic[CaseT, InputsT]):
    """An operation as suites, run folders, reports and builds see it."""

    operation: Operation
    baseline: str
    """Of a suite that names none."""
    case_keys: frozenset[str]
    """Keys that a case of a suite may have, besides ``name``."""
    parse_case: Callable[[Table, str, str], CaseT]
    """(table, name, dtype): a suite's case. Raises UsageError."""
    columns: tuple[str, ...]
    """Of ``samples.csv``: the nine that all operations share, then what they like, `runs.COMMON_COLUMNS` among them."""
    cells: Callable[[CaseT], Mapping[str, object]]
    """A case in those columns of ``samples.csv`` that are the operation's own."""
    shape: Callable[[CaseT], str]
    """The sizes in one short phrase."""
    shape_legend: Callable[[Sequence[CaseT]], str]
    """How to read ``shape``, as the end of a sentence that begins with *Shape is*."""
    implementations: Callable[[], tuple[Implementation, ...]]
    """Those that come with the lab."""
    plug_in: Callable[[Callable[..., Any]], Prepare]
    """``Implementation.prepare`` for a user's function; its signature is in docs/your-own-kernel.md."""
    cpu_kernels: tuple[str, ...]
    """Of `flashmoe_science.cpu`, that a run on CPU needs."""
    cuda_kernels: Callable[[Sequence[str]], list[CudaKernel]]
    """All CUDA kernels for these architectures."""
    needed: Callable[[Sequence[CudaKernel], Sequence[CaseT]], list[CudaKernel]]
    """Of a version's kernels, other operations' too, those that the cases can lead to."""
    numerics: Callable[[], Numerics[CaseT, InputsT]]
