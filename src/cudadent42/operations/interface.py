"""What an operation tells the lab. Planning, timing, comparing and reporting know no operation but through this.

`Definition` is what planning, recording and reporting need, and imports no torch; `Numerics` is what verifying and
timing need, and does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from cudadent42.model.cases import Case
from cudadent42.model.implementations import UnsupportedCaseError

if TYPE_CHECKING:
    from torch import Tensor

    from cudadent42.base.toml import Table
    from cudadent42.model.implementations import Call, Implementation, Prepare
    from flashmoe_science.cuda.choice import Choice, Tuned
    from flashmoe_science.cuda.device import Device
    from flashmoe_science.jit.nvrtc import CudaKernel

CaseT = TypeVar("CaseT", bound=Case)
InputsT = TypeVar("InputsT", bound="Inputs")

OnChunk = Callable[[], None]
"""Told from time to time that a computation which can take minutes goes on."""


def nothing() -> None:
    """`OnChunk` where nobody has to be told."""


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
    only_on: str = ""
    """The kind of device that it is asked on, `cpu` or `cuda`; empty: any."""

    def asked_on(self, device: str) -> bool:
        """Of `cpu`, `cuda:0` and the like."""
        return self.only_on in ("", device.partition(":")[0])


@dataclass(frozen=True)
class Blocks:
    """Rows of a result that are judged together, such as those of one expert's gradient, one block after the other."""

    part: str
    """Of the result, that is made of them: ``w13``."""
    owner: str
    """What a block belongs to: ``token``, ``expert``."""
    first: int
    """Row of the result where they begin."""
    rows: int
    """Of a block."""
    limit: Tensor
    """(blocks,), float64: of the root of the sum of squared errors in a block."""
    limit_of_all: float
    """The same of all blocks together."""


@dataclass(frozen=True)
class Exact:
    """A float64 result with a bound for each entry, where the operation's mathematics gives one."""

    value: Tensor
    limit: Tensor
    """Of the absolute error that an entry may have, float64. Twice PyTorch's largest in the entry's row is allowed in
    any case."""
    blocks: tuple[Blocks, ...] = ()
    """Of all parts, where they are judged apart: the worst row is then the worst block, and the RMS that of a part."""


def _as_it_is(result: Any) -> Tensor:
    tensor: Tensor = result
    return tensor


@dataclass(frozen=True)
class Numerics(Generic[CaseT, InputsT]):
    """An operation's inputs, and what is right for them."""

    input_sets: Callable[[CaseT, int, int, str], list[InputsT]]
    """(case, seed, count, device): random inputs, reproducible; the first is the same for any count."""
    hard_inputs: Callable[[str], tuple[HardInput, ...]]
    """Adversarial inputs for a dtype."""
    hard_cases: Callable[[Sequence[CaseT], str], tuple[HardInput, ...]]
    """(cases, device): adversarial values at shapes that will be timed: a small one may be served by another kernel."""
    float64: Callable[[CaseT, InputsT, OnChunk], Tensor | Exact]
    """The result in float64."""
    pytorch: Callable[[CaseT, InputsT], Tensor]
    """PyTorch's result in the case's dtype: its error is the measure for everybody's."""
    pytorch_plain: Callable[[CaseT, InputsT], Tensor]
    """The same by plain operations, for where a fused one of PyTorch's gives NaN and float64 does not."""
    refresh: Callable[[CaseT, InputsT, int], Sequence[Tensor]] | None = None
    """(case, inputs, seed): writes new random values, where they are, into those inputs that change from one call to
    the next, while weights and what was prepared of them stay; returns the tensors it has written. None: such calls
    cannot be told from calls that remember, so a faster one is no claim."""
    large_rows: float = 0.0
    """By this a few rows of the first tensor that `refresh` writes are multiplied in one call of each case that is
    audited on a CPU: `hard_cases` has such values at shapes that are not too large alone. 0: nowhere."""
    gathered: Callable[[Any], Tensor] = _as_it_is
    """What a call returns as the one tensor that is compared, outside of timing: of use where it returns several."""


FIRST_COLUMNS = (
    *("implementation", "dtype", "batch_size", "seq_len", "hidden_dim", "num_heads", "latency_ms"),
    *("throughput_tokens_per_sec", "memory_mb"),
)
"""Of every ``samples.csv``, in this order."""

COMMON_COLUMNS = (
    *("implementation", "dtype", "latency_ms", "throughput_tokens_per_sec", "memory_mb", "case"),
    *("block", "seed", "position", "inner", "timestamp_s", "flags"),
)
"""Columns of ``samples.csv`` that say the same for every operation; ``case`` is ``Case.name``. The others come
from `Definition.cells`."""


def columns_with(*own: str) -> tuple[str, ...]:
    """Columns of ``samples.csv`` with these of the operation's own."""
    rest = [name for name in COMMON_COLUMNS if name not in (*FIRST_COLUMNS, "case")]
    return (*FIRST_COLUMNS, "case", *own, *rest)


@dataclass(frozen=True)
class Parts:
    """One kernel as calls that leave out a part of its work each, and the whole."""

    calls: Mapping[str, Call]
    """By the part that is left out, ``WHOLE`` first; empty where nothing can be left out."""
    why_not: str = ""
    """Why there are none."""


WHOLE = "none"
"""In ``Parts.calls``, the kernel with nothing left out."""


def other_size(sizes: Sequence[int], most: int, chance: Random) -> int:
    """Between the least of ``sizes`` and the greatest, at most ``most``, and none of them if that can be. Small and
    large ones are as likely."""
    high = max(1, min(max(sizes), most))
    low = min(min(sizes), high)
    low = max(1, high // 2) if low == high else low
    for _ in range(_TRIES):
        size = round(low * math.exp(chance.random() * math.log(high / low)))
        if size not in sizes:
            break
    return size


_TRIES = 20
"""Of finding a size that is none of the given ones."""


def _no_parts(case: Case, inputs: object) -> Parts:
    return Parts({}, f"parts of the kernel cannot be left out for {case.operation}")


def _no_kernels(architectures: Sequence[str]) -> list[CudaKernel]:
    return []


def _none_needed(kernels: Sequence[CudaKernel], cases: Sequence[Case]) -> list[CudaKernel]:
    return []


@dataclass(frozen=True)
class Configured:
    """What a variant of this project's kernel, or its own choice, is for a case on a GPU."""

    choice: Choice
    kernels: tuple[CudaKernel, ...]
    """That depend on the configuration."""


def _no_variants(name: str, case: Case, device: Device) -> Configured:
    raise UnsupportedCaseError(f"{case.operation} has no variants whose kernels can be named")


def _not_tuned() -> Tuned[Any] | None:
    return None


def _several(case: Case, device: Device) -> CudaKernel | None:
    return None


@dataclass(frozen=True)
class Definition(Generic[CaseT, InputsT]):
    """An operation as suites, run folders, reports and builds see it."""

    case_type: type[CaseT]
    """A frozen dataclass. Its class variable ``operation`` is the operation's name, and no field is called so."""
    baseline: str
    """Of a suite that names none."""
    case_keys: frozenset[str]
    """Keys that a case of a suite may have, besides ``name``."""
    parse_case: Callable[[Table, str, str], CaseT]
    """(table, name, dtype): a suite's case. Raises UsageError."""
    columns: tuple[str, ...]
    """Of ``samples.csv``: the nine that all operations share, then what they like, ``COMMON_COLUMNS``
    among them; `columns_with` makes such a list."""
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
    numerics: Callable[[], Numerics[CaseT, InputsT]]
    unplanned: Callable[[Sequence[CaseT], Random, int], Sequence[CaseT]] | None = None
    """(cases, chance, count): cases of other sizes within the range of these, none of them among these. None where the
    operation offers none; then no result of a shape that the plan does not show is checked."""
    differentiates: bool = False
    """Whether gradients are computed; a report of others says that they were not timed."""
    function: str = ""
    """Of ``flashmoe_science``, that a race of two revisions calls; empty where that package does not have it."""
    cpu_kernels: tuple[str, ...] = ()
    """Of `flashmoe_science.cpu`, that a run on CPU needs."""
    cuda_kernels: Callable[[Sequence[str]], list[CudaKernel]] = _no_kernels
    """All CUDA kernels of this project for these architectures."""
    needed: Callable[[Sequence[CudaKernel], Sequence[CaseT]], list[CudaKernel]] = _none_needed
    """Of a version's kernels, other operations' too, those that the cases can lead to."""
    compiled: Callable[[CaseT, Device], CudaKernel | None] = _several
    """The one kernel that a call of this project's implementation compiles for a GPU; None where there are several."""
    configured: Callable[[str, CaseT, Device], Configured] = _no_variants
    """What an implementation of that name, this project's own or a variant of it, takes for a case on a GPU, which need
    not be here. Raises UnsupportedCaseError where it does not take the case."""
    tuned: Callable[[], Tuned[Any] | None] = _not_tuned
    """How tables of tuned configurations speak of this project's kernels; None where none is asked."""
    without: Callable[[CaseT, InputsT], Parts] = _no_parts
    """For profiles: this project's kernel with and without parts of its work."""

    def __post_init__(self) -> None:
        missing = [name for name in (*FIRST_COLUMNS, *COMMON_COLUMNS) if name not in self.columns]
        if missing or self.columns[: len(FIRST_COLUMNS)] != FIRST_COLUMNS:
            raise TypeError(
                f"columns of {self.operation}: expected to begin with {', '.join(FIRST_COLUMNS)} and to hold "
                f"{', '.join(COMMON_COLUMNS)}; `columns_with` makes such a list"
            )

    @property
    def operation(self) -> str:
        """The operation's name."""
        name: str = self.case_type.operation
        return name
