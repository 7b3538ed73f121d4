"""What a process may have set of torch before it calls, and whether results are the same bits then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils import deterministic

State = Callable[[], AbstractContextManager[object]]
Settings = dict[str, State]


@contextmanager
def swapped(get: Callable[[], Any], put: Callable[[Any], object], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def by(put: Callable[[Any], object], get: Callable[[], Any], *values: Any) -> Settings:
    """A state for each value of a setter that has a getter."""
    short = put.__name__
    name = f"torch.{short}" if getattr(torch, short, None) is put else f"{put.__module__}.{short}"
    return {f"{name}({value})": lambda value=value: swapped(get, put, value) for value in values}


def attribute(owner: Any, name: str, *values: Any) -> Settings:
    """The same for a property of one of torch's modules, where this torch has it."""
    if not hasattr(owner, name):
        return {}
    where = getattr(owner, "__name__", type(owner).__name__)

    def state(value: Any) -> State:
        return lambda: swapped(lambda: getattr(owner, name), lambda new: setattr(owner, name, new), value)

    return {f"{where}.{name}={value}": state(value) for value in values}


@contextmanager
def default_tensor_type(name: str) -> Iterator[None]:
    torch.set_default_tensor_type(name)
    try:
        yield
    finally:
        torch.set_default_tensor_type("torch.FloatTensor")


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def strictly_deterministic() -> Iterator[None]:
    """Every operation that is not deterministic is an error, and new memory is full of NaN."""
    with swapped(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, "error"):
        before = deterministic.fill_uninitialized_memory
        deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            deterministic.fill_uninitialized_memory = before


@contextmanager
def printing() -> Iterator[None]:
    torch.set_printoptions(precision=1, threshold=1, edgeitems=1, linewidth=20, sci_mode=True)
    try:
        yield
    finally:
        torch.set_printoptions(profile="default")


@contextmanager
def flushing() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def autocasting(device: str, dtype: torch.dtype) -> State:
    return lambda: torch.autocast(device, dtype)


STATES: Settings = {
    **by(torch.set_default_dtype, torch.get_default_dtype, torch.float64, torch.bfloat16, torch.float16),
    "torch.set_default_tensor_type": lambda: default_tensor_type("torch.DoubleTensor"),
    "torch.set_default_device(meta)": lambda: default_device("meta"),
    "torch.set_default_device(cuda)": lambda: default_device("cuda"),
    "with torch.device(meta)": lambda: torch.device("meta"),
    "torch.no_grad": torch.no_grad,
    "torch.inference_mode": torch.inference_mode,
    "torch.autocast(cpu, bfloat16)": autocasting("cpu", torch.bfloat16),
    "torch.autocast(cpu, float16)": autocasting("cpu", torch.float16),
    **by(torch.set_anomaly_enabled, torch.is_anomaly_enabled, True),
    **by(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled, False),
    **by(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode, "warn", "error"),
    "torch.use_deterministic_algorithms, fill_uninitialized_memory": strictly_deterministic,
    **by(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision, "high", "medium"),
    "torch.set_flush_denormal": flushing,
    **by(torch.set_grad_enabled, torch.is_grad_enabled, False),
    **by(torch.set_num_threads, torch.get_num_threads, 1, 3),
    "torch.set_printoptions": printing,
    **by(torch.set_rng_state, torch.get_rng_state, torch.Generator().manual_seed(3).get_state()),
    **by(torch.set_warn_always, torch.is_warn_always_enabled, True),
    **by(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled, False),
    **attribute(torch.backends.mkldnn, "enabled", False),
    **attribute(torch.backends.mkldnn, "deterministic", True),
    **attribute(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    **attribute(torch.backends.opt_einsum, "enabled", False),
    **attribute(torch.backends.cudnn, "enabled", False),
    **attribute(torch.backends.cudnn, "deterministic", True),
    **attribute(torch.backends.cudnn, "benchmark", True),
    **attribute(torch.backends.cudnn, "allow_tf32", False),
    **attribute(torch.backends.cuda.matmul, "allow_tf32", True),
    **attribute(torch.backends.cuda.matmul, "allow_fp16_accumulation", True),
    **attribute(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    **attribute(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
}
"""What a process may have set before it calls. `torch.autocast` stands for the setters that are its parts."""


def same_bits(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.dtype == b.dtype
        and a.device == b.device
        and torch.equal(
            a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
        )
        for a, b in zip(one, other, strict=True)
    )


def records() -> bool:
    """Whether autograd records calls."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
