"""What an attention kernel can be compiled without, to measure what it costs."""

from __future__ import annotations

from enum import Enum

MACRO = "ABLATE"


class Ablation(Enum):
    """What the kernel leaves out: its result is then wrong. The values are those of the macro."""

    NONE = 0
    EXPONENTIALS = 1
    MASK = 2
    LOADS = 3
    """Of keys and values, or of the queries and output gradients that a backward kernel walks over: once the stages in
    shared memory have been filled; on a CPU, once the first block is in the cache."""
    SUMS = 4
    """Of a query's gradient in global memory, with the wait for the turn to add to them: in Hopper's backward kernel of
    one pass alone."""

    @property
    def macros(self) -> dict[str, int]:
        """Nothing for the whole kernel, so that its recipe is the same as without this possibility."""
        return {} if self is Ablation.NONE else {MACRO: self.value}
