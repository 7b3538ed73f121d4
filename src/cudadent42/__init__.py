"""The kernel lab: from an unknown machine to a number that can be defended."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from os import PathLike

from cudadent42.version import __version__

__all__ = ["__version__", "capture"]


def capture(output: str | PathLike[str] = "captured.toml") -> AbstractContextManager[None]:
    """Records every call of attention and experts inside ``with cudadent42.capture():`` as a suite.

    ``cudadent42 run --suite captured.toml`` then says how much faster the block would be with this project's kernels
    (docs/capture.md). In a script that ``cudadent42 capture`` runs, the blocks say what of the script counts.

    Args:
        output: the suite's file. Calls that need another one, as experts beside attention do, go to files beside it.
    """
    # By name: torch, which this imports, is nothing that `import cudadent42` waits for.
    context = importlib.import_module(f"{__name__}.recording.context")
    manager: AbstractContextManager[None] = context.capture(output)
    return manager
