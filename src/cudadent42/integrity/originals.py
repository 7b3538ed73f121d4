"""Whether the functions that measure and judge are still those that were imported.

Of this lab's modules everything counts: functions with their code and defaults, classes with their methods, constants.
Of PyTorch, functions and methods, and the kernels behind the operators that baselines and references call.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

LAB = "cudadent42"

CLOCKS = ("time", "gc", "statistics", "resource", "os", "signal", "json")
"""Modules of Python's own whose functions a measurement rests on."""

TORCH = ("torch", "torch.nn.functional", "torch.cuda", "torch.nn.attention", "torch._C._nn")

TORCH_CLASSES = ("Tensor", "cuda.Event", "cuda.Stream", "cuda.CUDAGraph", "Generator")

OPERATORS = (
    *("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_attention_math"),
    *("mm", "bmm", "addmm", "matmul", "linear", "_softmax", "_grouped_mm", "copy_", "empty_like"),
)
"""Of ``aten``: a kernel that is registered in the place of one of these changes the baseline behind its name."""

_KERNEL_KEYS = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd")
"""Others, such as Meta's, are registered by PyTorch itself when its compiler is imported."""

_BY_TORCH = frozenset({"torch.manual_seed"})
"""What PyTorch replaces by itself, when its compiler is imported."""

_PRIMITIVE = (bool, int, float, str, bytes, frozenset, tuple)


@dataclass(frozen=True)
class Replaced:
    """One name that means something else now."""

    name: str
    of_lab: bool
    """It is the lab's, or a clock; else PyTorch's."""


class Originals:
    """As things are when it is made. Holds what it saw, so that no other object can take its identity."""

    def __init__(self) -> None:
        self._spaces = dict(_spaces())
        self._seen = {label: _snapshot(space) for label, space in self._spaces.items()}
        self._kernels = _kernels()
        self._modes = _modes()

    def replaced(self) -> list[Replaced]:
        """What is not as it was. A few milliseconds."""
        replaced = []
        for label, space in self._spaces.items():
            of_lab = not label.startswith("torch")
            now: Mapping[str, Any] = space
            for name, seen in self._seen[label].items():
                if not _same(seen, now.get(name)) and f"{label}.{name}" not in _BY_TORCH:
                    replaced.append(Replaced(f"{label}.{name}", of_lab))
        replaced += [
            Replaced(f"the kernel of torch.ops.aten.{name}", False)
            for name, kernel in _kernels().items()
            if kernel != self._kernels.get(name)
        ]
        if _modes() != self._modes:
            replaced.append(Replaced("torch's stack of function and dispatch modes", False))
        replaced += [Replaced(f"sys.modules[{name!r}]", True) for name in _exchanged(self._spaces)]
        return replaced


def _spaces() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Names and what they mean, by where they are."""
    for name, module in list(sys.modules.items()):
        if name == LAB or name.startswith(f"{LAB}.") or _is_of_lab(module):
            yield name, vars(module)
            for item in list(vars(module).values()):
                if isinstance(item, type) and item.__module__ == name:
                    yield f"{name}.{item.__qualname__}", item.__dict__
            yield from _records(name, vars(module))
    for name in CLOCKS:
        yield name, vars(sys.modules[name]) if name in sys.modules else vars(__import__(name))
    for name in TORCH:
        if name in sys.modules:
            yield name, vars(sys.modules[name])
    for name in TORCH_CLASSES:
        owner: Any = torch
        for part in name.split("."):
            owner = getattr(owner, part)
        yield f"torch.{name}", owner.__dict__


def _is_of_lab(module: types.ModuleType) -> bool:
    """Whether it is one of the lab's that was started as a program."""
    spec = getattr(module, "__spec__", None)
    return module.__name__ == "__main__" and str(getattr(spec, "name", "")).startswith(f"{LAB}.")


def _records(module: str, space: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The lab's records that a module holds, such as its implementations: frozen ones can be written to as well."""
    for name, item in list(space.items()):
        for number, each in enumerate(item if isinstance(item, tuple) else (item,)):
            if dataclasses.is_dataclass(each) and not isinstance(each, type) and hasattr(each, "__dict__"):
                place = f"[{number}]" if isinstance(item, tuple) else ""
                yield f"{module}.{name}{place}", vars(each)


_Seen = tuple[Any, ...]


def _snapshot(space: Mapping[str, Any]) -> dict[str, _Seen]:
    return {name: _seen(item) for name, item in list(space.items()) if _matters(name, item)}


def _matters(name: str, item: Any) -> bool:
    if name.startswith("__") and name not in ("__init__", "__call__", "__torch_function__", "__eq__"):
        return False
    return callable(item) or isinstance(item, (property, staticmethod, classmethod, *_PRIMITIVE))


def _seen(item: Any) -> _Seen:
    if isinstance(item, types.FunctionType):
        return item, item.__code__, item.__defaults__, item.__kwdefaults__
    return (item,)


def _same(seen: _Seen, now: Any) -> bool:
    original = seen[0]
    if original is not now:
        # Numbers and words of one value may be two objects, and a module may count with them.
        return isinstance(original, _PRIMITIVE) and type(original) is type(now) and original == now
    if len(seen) == 1:
        return True
    return now.__code__ is seen[1] and now.__defaults__ is seen[2] and now.__kwdefaults__ is seen[3]


def _kernels() -> dict[str, tuple[str, ...]]:
    """By operator, where the kernels behind it were registered."""
    kernels = {}
    for name in OPERATORS:
        try:
            text = torch._C._dispatch_dump(f"aten::{name}")
        except RuntimeError:  # not an operator of this PyTorch
            continue
        lines = (line.strip() for line in text.splitlines())
        kernels[name] = tuple(
            line for line in lines if line.split(":")[0].split("[")[0].strip() in _KERNEL_KEYS
        )
    return kernels


def _modes() -> tuple[int, int]:
    """Depths of the stacks of modes that see every call of PyTorch's."""
    return int(torch._C._len_torch_function_stack()), int(torch._C._len_torch_dispatch_stack())


def _exchanged(spaces: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Modules of which another stands in ``sys.modules`` now."""
    return [
        name
        for name, space in spaces.items()
        if (name in TORCH or name in CLOCKS or name.startswith(LAB))
        and isinstance(space, dict)
        and (module := sys.modules.get(name)) is not None
        and getattr(module, "__dict__", None) is not space
    ]
