"""PyTorch's and the process's global settings, kept apart for each implementation.

A candidate may choose its own: what it sets at import or before its first counted call is put back for everybody else's
turn, and set again for its own. So nobody's choice slows another.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cudadent42.integrity import process_settings

Settings = tuple[Any, ...]
"""Values in the order of ``KNOBS``."""


@dataclass(frozen=True)
class Knob:
    """One setting."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]


def _of_cublas(name: str) -> Knob:
    cublas = torch.backends.cuda.matmul
    return Knob(name, lambda: getattr(cublas, name), lambda value: setattr(cublas, name, value))


def _deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _knobs() -> Iterator[Knob]:
    sdp = torch.backends.cuda
    yield Knob("torch.set_num_threads", torch.get_num_threads, torch.set_num_threads)
    yield Knob("torch.set_grad_enabled", torch.is_grad_enabled, torch._C._set_grad_enabled)
    yield Knob("torch.set_default_dtype", torch.get_default_dtype, torch.set_default_dtype)
    yield Knob("flash_sdp", sdp.flash_sdp_enabled, sdp.enable_flash_sdp)
    yield Knob("mem_efficient_sdp", sdp.mem_efficient_sdp_enabled, sdp.enable_mem_efficient_sdp)
    yield Knob("math_sdp", sdp.math_sdp_enabled, sdp.enable_math_sdp)
    yield Knob("cudnn_sdp", sdp.cudnn_sdp_enabled, sdp.enable_cudnn_sdp)
    yield Knob("sdp_priority", torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order)
    yield Knob("mkldnn", torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled)
    yield Knob("cudnn.enabled", torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled)
    yield Knob("cudnn.benchmark", torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark)
    yield Knob("cudnn.deterministic", torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic)
    yield Knob("torch.set_float32_matmul_precision", _float32_matmul_precision, _set_float32_matmul_precision)
    yield from _float32_precisions()
    for kind in ("cpu", "cuda"):
        yield _autocast(kind)
    yield Knob("the profiler of torch.autograd", torch._C._autograd._profiler_enabled, _set_profiler)
    for name in (
        "allow_fp16_accumulation",
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
    ):
        yield _of_cublas(name)
    yield Knob(
        "torch.use_deterministic_algorithms",
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        _deterministic,
    )
    yield Knob(
        "torch.autograd.set_detect_anomaly",
        torch.is_anomaly_enabled,
        lambda value: torch._C.set_anomaly_enabled(value),
    )
    yield Knob(
        "torch.autograd.set_multithreading_enabled",
        torch._C._is_multithreading_enabled,
        torch._C._set_multithreading_enabled,
    )
    yield Knob("sys.setprofile", sys.getprofile, sys.setprofile)
    yield Knob("sys.settrace", sys.gettrace, sys.settrace)
    yield Knob("sys.setswitchinterval", sys.getswitchinterval, sys.setswitchinterval)
    for name, read_it, write_it in process_settings.KNOBS:
        yield Knob(name, read_it, write_it)


def _float32_matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it was chosen for one backend, and not for all
        return _ONE_BACKENDS


_ONE_BACKENDS = "of one backend"


def _set_float32_matmul_precision(value: str) -> None:
    if value != _ONE_BACKENDS:
        torch.set_float32_matmul_precision(value)


def _float32_precisions() -> Iterator[Knob]:
    """By backend and kind of operation; after the setting for all of them, which writes these."""
    for backend, operations in _BACKENDS.items():
        for operation in operations:
            yield Knob(
                f"fp32_precision of {backend} {operation}",
                partial(torch._C._get_fp32_precision_getter, backend, operation),
                partial(torch._C._set_fp32_precision_setter, backend, operation),
            )


_BACKENDS = {
    "generic": ("all",),
    "cuda": ("all", "conv", "rnn", "matmul"),
    "mkldnn": ("all", "conv", "rnn", "matmul"),
}


def _autocast(kind: str) -> Knob:
    def set_it(value: tuple[bool, torch.dtype]) -> None:
        torch.set_autocast_dtype(kind, value[1])
        torch.set_autocast_enabled(kind, value[0])

    return Knob(
        f"autocast for {kind}",
        lambda: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
        set_it,
    )


def _set_profiler(runs: bool) -> None:
    """One that ended cannot be begun again."""
    if not runs:
        torch._C._autograd._disable_profiler()


KNOBS: tuple[Knob, ...] = tuple(_knobs())
"""Those by which one implementation can slow another, or free itself of being counted. Thread-local ones are the main
thread's, in which all calls are made."""


def read() -> Settings:
    """As they are now. Some tens of microseconds."""
    return tuple(knob.read() for knob in KNOBS)


def write(wanted: Settings) -> None:
    """Those that are not so already."""
    for knob, value, now in zip(KNOBS, wanted, read(), strict=True):
        if not _alike(now, value):
            knob.write(value)


def same(before: Settings, after: Settings) -> bool:
    """Whether nothing differs."""
    return all(map(_alike, before, after))


def _alike(before: Any, after: Any) -> bool:
    """Nothing of a candidate's is asked: a tracer may say that it is equal to whatever was there before."""
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if type(before) in _PLAIN:
        return bool(before == after)
    if isinstance(before, (tuple, list)):
        return len(before) == len(after) and all(map(_alike, before, after))
    if type(before) is dict:  # of the environment, which holds bytes alone
        return before == after and all(type(value) is bytes for value in after.values())
    return False


_PLAIN = frozenset({bool, int, float, str, bytes, frozenset})
"""What the lab reads itself, and what holds nothing of anybody else's."""


def changes(before: Settings, after: Settings) -> Mapping[str, tuple[Any, Any]]:
    """By name, old and new value of those that differ."""
    return {
        knob.name: (old, new)
        for knob, old, new in zip(KNOBS, before, after, strict=True)
        if not _alike(old, new)
    }


def in_words(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """``flash_sdp True -> False, ...``."""
    return ", ".join(f"{name} {_change(old, new)}" for name, (old, new) in changed.items())


_FEW = 4
"""Values of one setting that are shown."""


def _change(old: Any, new: Any) -> str:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
        return ", ".join(os.fsdecode(name) for name in names)
    if isinstance(old, tuple) and len(old) > _FEW:
        return "changed"
    return f"{_short(old)} -> {_short(new)}"


def _short(value: Any) -> str:
    text = getattr(value, "__name__", None) or str(value)
    return text if len(text) <= 40 else text[:37] + "..."
