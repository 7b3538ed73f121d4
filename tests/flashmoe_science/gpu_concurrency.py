"""One kernel with other launches of it in flight: streams, threads, graphs. Every call must give the bits that it gives
alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor


class CheckedCall:
    """A call with its expected bits; `check` compares on the device, without waiting for it."""

    def __init__(self, run: Callable[[], Tensor]) -> None:
        self.run = run
        self.expected = run()
        torch.cuda.synchronize()

    def check(self, different: Tensor) -> None:
        different += (self.run() != self.expected).sum()


def counts(number: int) -> list[Tensor]:
    """Of different elements; 0 on the device."""
    counters = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(number)]
    torch.cuda.synchronize()
    return counters


def assert_none(different: Sequence[Tensor]) -> None:
    torch.cuda.synchronize()
    assert [count.item() for count in different] == [0] * len(different)


def run_in_threads(work: Sequence[Callable[[], None]]) -> None:
    """Run all at once; re-raise what one of them raised."""
    with ThreadPoolExecutor(max_workers=len(work)) as pool:
        for future in [pool.submit(item) for item in work]:
            future.result()


def check_streams(calls: Sequence[CheckedCall], turns: int) -> None:
    streams = [torch.cuda.Stream() for _ in range(3)]
    different = counts(len(streams))
    for turn in range(turns):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                calls[(turn + number) % len(calls)].check(different[number])
    assert_none(different)


def check_threads(calls: Sequence[CheckedCall], turns: int, shared_stream: bool) -> None:
    """Four of them, each with a stream of its own or all with one."""
    one = torch.cuda.Stream()
    different = counts(4)

    def work(number: int) -> Callable[[], None]:
        def body() -> None:
            with torch.cuda.stream(one if shared_stream else torch.cuda.Stream()):
                for turn in range(turns):
                    calls[(turn + number) % len(calls)].check(different[number])

        return body

    run_in_threads([work(number) for number in range(4)])
    assert_none(different)


def check_graphs_beside_eager_calls(calls: Sequence[CheckedCall], turns: int) -> None:
    """Two graphs in flight at once, one of them on two streams in turn, and eager calls beside them."""
    different = counts(3)
    graphs = []
    for number in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call.check(different[number])
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in range(3)]
    for turn in range(turns):
        with torch.cuda.stream(streams[turn % 2]):
            graphs[0].replay()
        with torch.cuda.stream(streams[2]):
            graphs[1].replay()
        calls[turn % len(calls)].check(different[2])
    assert_none(different)


def check_branches_of_one_graph(calls: Sequence[CheckedCall], turns: int) -> None:
    """Launches that the graph may run side by side."""
    different = counts(2)
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        for call in calls:
            call.check(different[0])
        with torch.cuda.stream(side):
            for call in calls:
                call.check(different[1])
        torch.cuda.current_stream().wait_stream(side)
    for _ in range(turns):
        graph.replay()
    assert_none(different)
