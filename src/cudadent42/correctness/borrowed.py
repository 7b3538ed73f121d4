"""Whether an implementation does the baseline's or PyTorch's own work under another name.

Two things tell: the operators of PyTorch's that a call runs, seen by a dispatch mode, and results that are PyTorch's
bit for bit where none of these was seen, as where another thread calls them. Sums in another order differ in some bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cudadent42.correctness.forms import wrong_kind
from cudadent42.correctness.truth import Truth
from cudadent42.model.implementations import Call, Implementation
from cudadent42.operations import numerics

LEAST_ENTRIES = 4096
"""Of results that are PyTorch's bit for bit: as many are not by chance."""

_MOST_NAMES = 3
"""In a line."""

_MOVES = frozenset(
    {
        *("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_zeros"),
        *("aten::new_empty_strided", "aten::zeros", "aten::zeros_like", "aten::zero_", "aten::fill_"),
        *("aten::copy_", "aten::_to_copy", "aten::clone", "aten::contiguous", "aten::detach", "aten::alias"),
        *("aten::set_", "aten::resize_", "aten::lift_fresh", "aten::_local_scalar_dense"),
    }
)
"""Operators that compute nothing; views are left out as well."""

_PYTORCHS = "aten::"
"""How the names of its operators begin. One of somebody's own hides what it calls, so its bits tell."""

_BASELINE = "pytorch"
"""The implementation that is PyTorch's, all of it of its own operators."""

Operator = tuple[str, tuple[tuple[int, ...], ...], tuple[str, ...]]
"""Its name, and the shapes and dtypes of the tensors that it was given."""


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is computed below it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: Counter[Operator] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch would import its compiler to keep it out of here, a second of a processor."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
        if schema.name not in _MOVES and not is_view:
            given = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, Tensor)]
            shapes = tuple(tuple(each.shape) for each in given)
            self.operators[(schema.name, shapes, tuple(str(each.dtype) for each in given))] += 1
        return func(*args, **(kwargs or {}))


def operators(call: Callable[[], object]) -> Counter[Operator]:
    """What computes in ``call``, in this thread. Whatever it raises is raised."""
    mode = _Mode()
    with mode:
        call()
    return mode.operators


@dataclass
class Borrowed:
    """What was seen of one implementation."""

    by_operators: dict[str, str] = field(default_factory=dict)
    """By case: whose work a call ran, and by which operators. The first decides, whatever comes after it."""
    cases: int = 0
    same_bits: int = 0
    """Cases whose results were PyTorch's bit for bit, without any operator of PyTorch's that computes."""
    entries: int = 0
    """Of these results."""

    @property
    def evidence(self) -> str:
        """In words; empty where there is none."""
        if self.by_operators:
            case, what = next(iter(self.by_operators.items()))
            return f"on {case} its call runs {what}"
        if self.same_bits and self.same_bits == self.cases and self.entries >= LEAST_ENTRIES:
            return f"all {self.entries} entries of its results are PyTorch's bit for bit, in all {self.cases} cases"
        return ""


def look(seen: Borrowed, truth: Truth, call: Call, result: object, baseline: Implementation) -> None:
    """Adds one case, on which ``call`` returned ``result``. Calls it once more."""
    seen.cases += 1
    # Ahead of the second call, which sees the mode: into a buffer that it returns each time it could write other bits.
    equal = _equal_entries(truth, result)
    try:
        own = operators(call)
    except Exception:  # noqa: BLE001 - a candidate may not work below a mode, and then its bits tell
        own = Counter()
    of_pytorch = any(name.startswith(_PYTORCHS) for name, _, _ in own)
    if not of_pytorch and equal:
        seen.same_bits += 1
        seen.entries += equal
    if not own or (not of_pytorch and baseline.name == _BASELINE):
        return
    for name, others in _others(truth, baseline):
        if others and not others - own:
            names = [*dict.fromkeys(operator for operator, _, _ in others)]
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            words = f"{', '.join(names[:_MOST_NAMES])}{more}"
            seen.by_operators[truth.case.id] = f"what {name} runs ({words})"
            return


def _equal_entries(truth: Truth, result: object) -> int:
    """How many there are if all are PyTorch's, otherwise none."""
    if not isinstance(result, Tensor) or wrong_kind(result):
        return 0
    gathered = numerics(truth.case).gathered(result)
    same = gathered.shape == truth.pytorch.shape and torch.equal(gathered, truth.pytorch)
    return gathered.numel() if same else 0


def _others(truth: Truth, baseline: Implementation) -> list[tuple[str, Counter[Operator]]]:
    """What the baseline and PyTorch run for the same inputs. Of one that does not work below a mode, as what
    torch.compile made may not, nothing is known."""
    case, inputs = truth.case, truth.inputs
    whole: list[tuple[str, Counter[Operator]]] = []
    with suppress(Exception), baseline.context():
        whole.append((f"the baseline {baseline.name}", operators(baseline.prepare(case, inputs))))
    if baseline.name != _BASELINE:
        with suppress(Exception):
            whole.append(("PyTorch", operators(lambda: numerics(case).pytorch(case, inputs))))
    return whole
