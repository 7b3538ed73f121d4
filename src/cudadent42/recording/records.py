"""What is kept of the calls of one run of a script."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

Sizes = dict[str, int | float | bool | str | tuple[int, ...]]
"""Keys of a suite's case, without its name and dtype."""


class Kind(str, Enum):
    ATTENTION = "attention"
    EXPERTS = "moe"


@dataclass(frozen=True)
class Group:
    """All calls that were the same problem in the same way."""

    kind: Kind
    what: str
    """The problem in words."""
    device: str
    """``cpu`` or ``cuda``."""
    dtype: str
    """As suites name it, or as torch does where they do not."""
    sizes: Sizes | None
    """None where a suite cannot have the problem; then there is a reason."""
    baseline: str
    """Of the lab's implementations, the one that the script called."""
    reason: str | None
    """Why this project's kernels do not take the calls, or why they are not raced; None where they are."""
    ours: bool
    """This project's kernels computed them."""
    gradients: bool
    """Autograd recorded them."""
    calls: int
    seconds: float
    """Of all calls together."""
    squares: float
    """Sum of the squares of each call's seconds."""
    backward_calls: int = 0
    backward_seconds: float = 0.0
    backward_squares: float = 0.0
    note: str = ""
    """What of the calls the case leaves out."""

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for the same calls in another run of the script."""
        sizes = (
            None
            if self.sizes is None
            else tuple(sorted((key, str(each)) for key, each in self.sizes.items()))
        )
        return (self.kind, self.what, self.device, self.dtype, sizes, self.baseline, self.reason, self.ours)


@dataclass(frozen=True)
class Recording:
    """One run of a script, or of the blocks of it that were recorded."""

    seconds: float
    groups: tuple[Group, ...]
    own_seconds: float = 0.0
    """That the recording itself took of the script's time, on the CPU."""
    traced: int = 0
    """Calls that torch.compile traced: each is one place in a compiled graph, whatever often the graph runs."""
    in_cuda_graphs: int = 0
    """Calls that went into a CUDA graph, which ran who knows how often."""
    overlapped: bool = False
    """Calls of several threads ran at the same time."""
    cold_weights: bool = False
    """The weights of all experts that were called are together more than the last-level cache: a layer's are gone
    from it when their turn comes again."""
    blocks: int = 0
    """``with cudadent42.capture():`` blocks that are all of what was recorded; 0 where it was the whole script."""
    versions: dict[str, str] = field(default_factory=dict)
