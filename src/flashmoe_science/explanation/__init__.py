"""Which kernel and configuration a call takes, and why not another.

What can be explained is in `functions`, a module each with its record, `EXPLAINED`. No list names them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

import torch

from flashmoe_science.cuda.device import GPUS, Device
from flashmoe_science.errors import InputError
from flashmoe_science.explanation.on_cpu import explained_on_cpu
from flashmoe_science.explanation.record import Explainable, Explanation

__all__ = ["Explanation", "explain"]


def explain(
    function: Callable[..., Any], *tensors: torch.Tensor, gpu: str | None = None, **options: Any
) -> Explanation:
    """Which kernel and configuration a call takes, and why not another.

    ``explain(flash_attention, query, key, value, causal=True)`` explains that call. It launches and compiles nothing,
    so that the tensors may be on ``meta``.

    Args:
        function: `flash_attention`, `attention_varlen`, `fused_moe` or `topk_routing`.
        tensors, options: its arguments.
        gpu: answer for this GPU, which need not be there: T4, A100, A10, L4, L40S, RTX 4090, H100, H200 or B200. The
            tensors' own device unless given.

    Raises:
        InputError: arguments that the function refuses, or a GPU that is not in the list.
        DeviceError: no kernel takes the call.
    """
    function = inspect.unwrap(function)  # of one that stands in its place, as a recorder's does
    record = _records().get(function)
    if record is None:
        *names, last = sorted(each.name for each in _records().values())
        raise InputError(
            f"there is nothing to explain about {getattr(function, '__name__', function)!r}; "
            f"expected {', '.join(names)} or {last}"
        )
    try:
        bound = inspect.signature(function).bind(*tensors, **options)
    except TypeError as error:
        raise InputError(f"{function.__name__} cannot be called so: {error}") from error
    bound.apply_defaults()
    arguments = bound.arguments
    device = None if gpu is None else _named(gpu)
    first = next(iter(arguments.values()))
    if device is None and not (isinstance(first, torch.Tensor) and first.is_cuda):
        return explained_on_cpu(record, arguments)
    return record.on_cuda(arguments, device)


@functools.cache
def _records() -> Mapping[Callable[..., Any], Explainable]:
    """By the function as it was defined."""
    package = importlib.import_module(f"{__name__}.functions")
    records = [
        importlib.import_module(f"{package.__name__}.{module.name}").EXPLAINED
        for module in pkgutil.iter_modules(package.__path__)
    ]
    return {inspect.unwrap(record.function): record for record in records}


def _named(gpu: str) -> Device:
    by_name = {name.upper(): device for name, device in GPUS.items()}
    if gpu.upper() not in by_name:
        raise InputError(f"gpu is {gpu!r}; expected one of {', '.join(GPUS)}")
    return by_name[gpu.upper()]
