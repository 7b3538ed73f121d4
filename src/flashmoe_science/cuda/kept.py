"""Memory that outlives the call that asks for it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


def kept(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What `make` allocates on the current stream, in a thread of its own.

    torch.compile's CUDA graphs, as they warm up, send what a thread allocates to memory of the graph, and end with an
    error if any of it is kept. Modes and inference mode are of a thread, too. Not for a stream that is captured.
    """
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else None

    def make_there() -> torch.Tensor:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(max_workers=1) as other:
        return other.submit(make_there).result()
