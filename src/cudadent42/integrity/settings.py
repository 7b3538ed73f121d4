"""PyTorch's and the process's global settings, kept apart for each implementation.

A candidate may choose its own: what it sets at import or before its first counted call is put back for everybody else's
turn, and set again for its own. So nobody's choice slows another.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

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
    yield Knob(
        "torch.set_float32_matmul_precision",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    )
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
    yield Knob("sys.setprofile", sys.getprofile, sys.setprofile)
    yield Knob("sys.setswitchinterval", sys.getswitchinterval, sys.setswitchinterval)
    yield Knob(
        "signal.SIGCHLD",
        lambda: signal.getsignal(signal.SIGCHLD),
        lambda value: signal.signal(signal.SIGCHLD, value),
    )
    if hasattr(os, "sched_getaffinity"):
        yield Knob(
            "os.sched_setaffinity",
            lambda: frozenset(os.sched_getaffinity(0)),
            lambda value: os.sched_setaffinity(0, value),
        )


KNOBS: tuple[Knob, ...] = tuple(_knobs())
"""Those by which one implementation can slow another, or free itself of being counted. Thread-local ones are the main
thread's, in which all calls are made."""


def read() -> Settings:
    """As they are now. Some microseconds."""
    return tuple(knob.read() for knob in KNOBS)


def write(wanted: Settings) -> None:
    """Those that are not so already."""
    for knob, value, now in zip(KNOBS, wanted, read(), strict=True):
        if now != value:
            knob.write(value)


def changes(before: Settings, after: Settings) -> Mapping[str, tuple[Any, Any]]:
    """By name, old and new value of those that differ."""
    return {knob.name: (old, new) for knob, old, new in zip(KNOBS, before, after, strict=True) if old != new}


def in_words(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """``flash_sdp True -> False, ...``."""
    return ", ".join(f"{name} {_short(old)} -> {_short(new)}" for name, (old, new) in changed.items())


def _short(value: Any) -> str:
    text = getattr(value, "__name__", None) or str(value)
    return text if len(text) <= 40 else text[:37] + "..."
