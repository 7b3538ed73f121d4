"""Calls of an operation that are ready: what depends on shapes, types and options is done once for each thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flashmoe_science.alike import Matches, matcher, never
from flashmoe_science.cuda.repeat import Call, current_device
from flashmoe_science.plans import keep

Tensors = tuple[torch.Tensor, ...]
Options = tuple[Any, ...]


class Ready(NamedTuple):
    """A call that can be made, and what the next one is compared with once it was."""

    call: Call
    recent: tuple[Any, ...]
    """The number of tensors (an operation may do without some), the options, whether tensors are like this call's, and
    the call.
    """


def _no_call(*tensors: torch.Tensor) -> tuple[Any, ...]:
    raise AssertionError("nothing matches before the first call")


class Calls(threading.local):
    """The calls of one operation that this thread made ready, and its last one.

    A call owns the buffers that its launches read, so every thread has its own; no lock is needed.
    """

    def __init__(
        self,
        check: Callable[[Tensors, Options], None],
        prepare: Callable[[Tensors, Options, int], Call],
        *,
        options: int,
        most: int = 4096,
        repeated: Callable[[Options], bool] = lambda options: True,
        under_no_grad: bool = False,
    ) -> None:
        """
        Args:
            check: raises InputError unless the arguments make sense together; at a combination's first call, and at
                those that say that the tensors are none.
            prepare: a call for tensors like these, which have been checked; their device, by index, is current.
            options: how many there are.
            most: calls that a thread keeps; one is about a kilobyte.
            repeated: whether calls with these options may be recognised as like the last one.
            under_no_grad: the operation is never recorded, so that tensors that require a gradient are like any other.
        """
        self._check = check
        self._prepare = prepare
        self._options = options
        self._most = most
        self._repeated = repeated
        self._under_no_grad = under_no_grad
        self.ready: dict[tuple[Any, ...], Ready] = {}
        """By signature, which ends in the options."""
        self.recent: tuple[Any, ...] = (0, *(None,) * options, never, _no_call)
        """See `Ready`."""

    def __call__(self, tensors: Tensors, options: Options) -> tuple[Any, ...]:
        """The results for tensors, the first of which is on a GPU; ``options`` can be hashed and compared.

        An operation for which every tenth of a microsecond counts does this itself, as attention does.
        """
        recent = self.recent
        if recent[0] == len(tensors) and recent[1:-2] == options and recent[-2](*tensors):
            results: tuple[Any, ...] = recent[-1](*tensors)
            return results
        try:
            signature = signature_of(tensors, options)
            ready = self.ready.get(signature)
        except (AttributeError, TypeError, RuntimeError):
            # Not tensors, not dense, or an option that cannot be hashed: the checks say which.
            self._check(tensors, options)
            raise
        device = tensors[0].get_device()
        if ready is None or device != current_device():
            return self.first(signature, tensors)
        self.recent = ready.recent
        return ready.call(*tensors)

    def first(self, signature: tuple[Any, ...], tensors: Tensors) -> tuple[Any, ...]:
        """The results of a call that is not ready, or whose device is not current: rare, or dearer than a check is."""
        options = signature[-self._options :]
        self._check(tensors, options)
        device = tensors[0].get_device()
        with torch.cuda.device(device):
            ready = self.ready.get(signature)
            if ready is None:
                ready = self._make_ready(tensors, options, device)
                keep(self.ready, signature, ready, self._most)
            return ready.call(*tensors)

    def _make_ready(self, tensors: Tensors, options: Options, device: int) -> Ready:
        call = self._prepare(tensors, options, device)
        matches = never
        if self._repeated(options):
            matches = matcher(*tensors, under_no_grad=self._under_no_grad)
        if torch.cuda.device_count() > 1:
            matches = _and_current(matches, device)
        return Ready(call, (len(tensors), *options, matches, call))


def signature_of(tensors: Tensors, options: Options) -> tuple[Any, ...]:
    """What a prepared call depends on. Raises AttributeError or RuntimeError for what is no dense tensor."""
    parts: list[Any] = [torch.is_inference_mode_enabled()]  # changes what matches
    for tensor in tensors:
        parts += (tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device())
    return (*parts, *options)


def _and_current(matches: Matches, device: int) -> Matches:
    """With one GPU, that is always the current one."""
    return lambda *tensors: matches(*tensors) and current_device() == device
