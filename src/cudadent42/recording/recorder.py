"""Counts and times calls. Who sees them is `seen`; a recorder keeps no tensor alive."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from cudadent42.recording.clock import CudaEvents, SharedClock
from cudadent42.recording.problems import Problem
from cudadent42.recording.records import Group, Recording
from cudadent42.timing.flush import cache_bytes
from flashmoe_science.torch_private import transform

R = TypeVar("R")

_MOST_NODES = 64
"""Of autograd's, for one call: PyTorch's composed attention has a dozen."""


class _Tally:
    """Calls of one problem so far."""

    def __init__(self, problem: Problem, *, ours: bool, gradients: bool) -> None:
        self.problem, self.ours, self.gradients = problem, ours, gradients
        self.calls = self.backward_calls = 0
        self.seconds = self.squares = self.backward_seconds = self.backward_squares = 0.0

    def take(self, seconds: float) -> None:
        self.seconds += seconds
        self.squares += seconds * seconds

    def take_backward(self, seconds: float) -> None:
        self.backward_seconds += seconds
        self.backward_squares += seconds * seconds

    @property
    def group(self) -> Group:
        problem = self.problem
        return Group(
            kind=problem.kind,
            what=problem.what,
            device=problem.device,
            dtype=problem.dtype,
            sizes=problem.sizes,
            baseline=problem.baseline,
            reason=problem.reason,
            ours=self.ours,
            gradients=self.gradients,
            calls=self.calls,
            seconds=self.seconds,
            squares=self.squares,
            backward_calls=self.backward_calls,
            backward_seconds=self.backward_seconds,
            backward_squares=self.backward_squares,
            note=problem.note,
        )


class _Frame:
    """A call that goes on in this thread."""

    __slots__ = ("ours",)

    def __init__(self) -> None:
        self.ours = False


class Recorder:
    """Of one run of a script."""

    def __init__(
        self, now: Callable[[], float] = time.perf_counter, *, belongs_to_command: bool = False
    ) -> None:
        self.active = False
        self.belongs_to_command = belongs_to_command
        self._now = now
        self._clock = SharedClock(now)
        self._events = CudaEvents()
        self._tallies: dict[Hashable, _Tally] = {}
        self._problems: dict[Hashable, Problem] = {}
        self._weights: dict[tuple[torch.device, int], int] = {}
        """Bytes of each tensor of weights, by where it lies."""
        self._lock = threading.Lock()
        self._local = threading.local()
        self._seconds = self._own_seconds = self._began = 0.0
        self._traced = self._in_cuda_graphs = self._blocks = 0
        self._in_block = False

    # ------------------------------------------------------------ from when to when

    def start(self) -> None:
        """The script begins, or a part of it that counts."""
        _wait()
        self._began = self._now()
        self.active = True

    def stop(self) -> None:
        if self.active:
            self.active = False
            _wait()
            self._seconds += self._now() - self._began
            self._events.finish()

    @contextmanager
    def block(self) -> Iterator[None]:
        """A block of the script: from the first one on only these count. One inside another is a part of it."""
        if self._in_block:
            yield
            return
        self._in_block = True
        self._start_block()
        try:
            yield
        finally:
            self.stop()
            self._in_block = False

    def _start_block(self) -> None:
        self.stop()
        if self._blocks == 0:
            self._tallies.clear()
            self._weights.clear()
            self._seconds = self._own_seconds = 0.0
            self._traced = self._in_cuda_graphs = 0
            self._clock.overlapped = False
        self._blocks += 1
        self.start()

    def recording(self) -> Recording:
        """What there is so far."""
        self._events.finish()
        with self._lock:
            groups = tuple(tally.group for tally in self._tallies.values() if tally.calls)
        return Recording(
            seconds=self._seconds,
            groups=groups,
            own_seconds=self._own_seconds,
            traced=self._traced,
            in_cuda_graphs=self._in_cuda_graphs,
            overlapped=self._clock.overlapped,
            cold_weights=self._have_cold_weights(),
            blocks=self._blocks,
            versions={"torch": torch.__version__},
        )

    def _have_cold_weights(self) -> bool:
        by_device: dict[torch.device, int] = {}
        for (device, _), size in self._weights.items():
            by_device[device] = by_device.get(device, 0) + size
        return any(size > cache_bytes(str(device)) for device, size in by_device.items())

    # ------------------------------------------------------------ calls

    def call(
        self,
        key: Hashable,
        problem: Callable[[], Problem],
        tensors: Iterable[torch.Tensor],
        function: Callable[[], R],
        *,
        weights: Iterable[torch.Tensor] = (),
        ours: bool = False,
    ) -> R:
        """The result of ``function()``, counted and timed.

        Args:
            key: equal for calls of the same problem.
            problem: what it is; asked for once for each key.
            tensors: what gradients may be taken of; the first one says the device.
            weights: what every call with other inputs reads again; plain tensors.
            ours: this project's kernels compute it.
        """
        entered = self._now()
        frames = self._frames()
        if frames:  # a part of a call that is counted already
            frames[0].ours = frames[0].ours or ours
            return function()
        tensors = tuple(tensors)
        device = tensors[0].device if tensors[0].is_cuda else None
        if device is not None and _capturing(device):
            self._in_cuda_graphs += 1
            frames.append(_Frame())
            try:
                return function()
            finally:
                frames.pop()
        described = self._problems.get(key)
        if described is None:
            described = self._problems.setdefault(key, problem())
        frame = _Frame()
        frame.ours = ours
        frames.append(frame)
        began = self._clock.begin() if device is None else self._events.begin(device)
        started = self._now()
        try:
            result = function()
        except BaseException:
            if device is None:
                self._clock.end(began)
            frames.pop()
            raise
        ended = self._now()
        seconds = self._clock.end(began) if device is None else None
        frames.pop()
        gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        with self._lock:
            tally = self._tallies.setdefault(
                (key, frame.ours, gradients), _Tally(described, ours=frame.ours, gradients=gradients)
            )
            tally.calls += 1
            for each in weights:
                self._weights[each.device, each.data_ptr()] = each.nbytes
            if seconds is not None:
                tally.take(seconds)
        if device is not None:
            self._events.end(began, tally.take, device)
        if gradients:
            self._watch_backward(tally, result, tensors, device)
        self._own_seconds += started - entered + self._now() - ended
        return result

    def traced(self) -> None:
        """One more place in a graph of torch.compile's."""
        self._traced += self.active

    def _frames(self) -> list[_Frame]:
        frames: list[_Frame] | None = getattr(self._local, "frames", None)
        if frames is None:
            frames = self._local.frames = []
        return frames

    # ------------------------------------------------------------ backward passes

    def _watch_backward(
        self, tally: _Tally, result: Any, tensors: Iterable[torch.Tensor], device: torch.device | None
    ) -> None:
        """Has the time taken of all of autograd's nodes that the call made: those between its result and its inputs."""
        output = result[0] if isinstance(result, tuple) else result
        if not isinstance(output, torch.Tensor) or output.grad_fn is None:
            return
        if transform() is not None:
            return  # whose nodes are not those that run
        before = {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}
        waiting = [output.grad_fn]
        nodes: list[Any] = []
        while waiting and len(nodes) < _MOST_NODES:
            node = waiting.pop()
            if node not in before and node not in nodes and type(node).__name__ != "AccumulateGrad":
                nodes.append(node)
                waiting += [following for following, _ in node.next_functions if following is not None]
        for number, node in enumerate(nodes):
            self._watch_node(tally, node, device, counts=number == 0)

    def _watch_node(self, tally: _Tally, node: Any, device: torch.device | None, *, counts: bool) -> None:
        began: list[Any] = []

        def before(gradients: Any) -> None:
            if self.active and (device is None or not _capturing(device)):
                began.append(self._clock.begin() if device is None else self._events.begin(device))

        def after(inputs: Any, outputs: Any) -> None:
            if not began:
                return
            if device is not None:
                self._events.end(began.pop(), tally.take_backward, device)
            seconds = self._clock.end(began.pop()) if device is None else None
            with self._lock:
                tally.backward_calls += counts
                if seconds is not None:
                    tally.take_backward(seconds)

        node.register_prehook(before)
        node.register_hook(after)


def _wait() -> None:
    """At the ends of what is timed as a whole, and nowhere else."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for index in range(torch.cuda.device_count()):
            # To wait for a device that nobody has used would set it up.
            if index == torch.cuda.current_device() or torch.cuda.memory_reserved(index):
                torch.cuda.synchronize(index)


def _capturing(device: torch.device) -> bool:
    """Whether the stream of this device, which need not be the current one, is captured into a CUDA graph."""
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
