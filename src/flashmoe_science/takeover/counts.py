"""What was taken over and what was not, with the reasons: the counts behind `flashmoe_science.report`."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from enum import Enum

from torch.compiler import is_dynamo_compiling

from flashmoe_science.takeover.tracing import constant_result


class Entry(Enum):
    """Where calls come from."""

    SDPA = "scaled_dot_product_attention"
    FLASH_IMPLEMENTATION = "flash_attention_impl"
    HUGGING_FACE_ATTENTION = "Hugging Face attention"
    HUGGING_FACE_EXPERTS = "Hugging Face experts"
    HUGGING_FACE_ROUTER = "Hugging Face routers"
    HUGGING_FACE_NORM = "Hugging Face norms"
    HUGGING_FACE_ROTATION = "Hugging Face rotations"

    __hash__ = object.__hash__  # that of `Enum` hashes the name anew in each call that is counted


@dataclass(frozen=True)
class Count:
    """How many calls had one fate."""

    entry: Entry
    declined: str | None
    """Why the call went to the previous kernel; None if it was taken."""
    traced: bool
    """Seen by torch.compile while it traced: each stands for one place of a graph, whatever often the graph runs."""
    calls: int


@dataclass(frozen=True)
class Report:
    """The calls since the start of the process, or since the last `reset_report`. `str()` gives a line a fate."""

    counts: tuple[Count, ...]
    """Taken calls first, then by number."""

    @property
    def taken(self) -> int:
        """Calls that the kernels computed, places in compiled graphs included."""
        return sum(count.calls for count in self.counts if count.declined is None)

    @property
    def declined(self) -> int:
        """Calls that went to the previous kernel, places in compiled graphs included."""
        return sum(count.calls for count in self.counts if count.declined is not None)

    def reasons(self, entry: Entry | None = None) -> dict[str, int]:
        """Why calls were declined, and how many, of one entry or of all."""
        reasons: Counter[str] = Counter()
        for count in self.counts:
            if count.declined is not None and entry in (None, count.entry):
                reasons[count.declined] += count.calls
        return dict(reasons)

    def __str__(self) -> str:
        if not self.counts:
            return "no call was taken or declined"
        width = max(len(f"{count.calls:,}") for count in self.counts)
        lines = []
        for count in self.counts:
            fate = "taken" if count.declined is None else f"declined: {count.declined}"
            compiled = " (traced by torch.compile)" if count.traced else ""
            lines.append(f"{count.calls:>{width},} {count.entry.value}{compiled} {fate}")
        return "\n".join(lines)


def report() -> Report:
    """What was taken over so far and what was not, with the reasons."""
    with _lock:
        kept = dict(_calls)
    counts = [Count(entry, declined, traced, calls) for (entry, declined, traced), calls in kept.items()]
    return Report(tuple(sorted(counts, key=lambda count: (count.declined is not None, -count.calls))))


def reset_report() -> None:
    """Forget all counts."""
    with _lock:
        _calls.clear()


def count(entry: Entry, declined: str | None) -> None:
    """One more call that was taken, or declined for the reason given. Reasons are few: they name no shapes."""
    if is_dynamo_compiling():
        _count_traced(entry.name, declined)
    else:
        _add(entry, declined, False)


@constant_result
def _count_traced(entry: str, declined: str | None) -> None:
    _add(Entry[entry], declined, True)


def _add(entry: Entry, declined: str | None, traced: bool) -> None:
    with _lock:
        _calls[entry, declined, traced] += 1


_lock = threading.Lock()
_calls: Counter[tuple[Entry, str | None, bool]] = Counter()
