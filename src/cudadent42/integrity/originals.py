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
from operator import attrgetter, is_
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
        self._seen = {
            label: _Snapshot(space, constants=not _is_torch(label)) for label, space in self._spaces.items()
        }
        self._dumps = _dumps()
        self._modes = _modes()

    def replaced(self) -> list[Replaced]:
        """What is not as it was. Below a millisecond, where everything is."""
        replaced = []
        for label, space in self._spaces.items():
            names = self._seen[label].replaced(space)
            of_lab = not _is_torch(label)
            replaced += [
                Replaced(f"{label}.{name}", of_lab) for name in names if f"{label}.{name}" not in _BY_TORCH
            ]
        replaced += [
            Replaced(f"the kernel of torch.ops.aten.{name}", False)
            for name, dump in _dumps().items()
            if dump != self._dumps.get(name) and _kernels(dump) != _kernels(self._dumps.get(name, ""))
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


def _is_torch(label: str) -> bool:
    return label == "torch" or label.startswith("torch.")


def _is_of_lab(module: types.ModuleType) -> bool:
    """Whether it is one of the lab's that was started as a program."""
    spec = getattr(module, "__spec__", None)
    return module.__name__ == "__main__" and str(getattr(spec, "name", "")).startswith(f"{LAB}.")


def _records(module: str, space: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The lab's records that a module holds, such as its implementations: frozen ones can be written to as well."""
    for name, item in list(space.items()):
        for number, each in enumerate(item if isinstance(item, tuple) else (item,)):
            if dataclasses.is_dataclass(each) and not isinstance(each, type) and hasattr(each, "__dict__"):
                index = f"[{number}]" if isinstance(item, tuple) else ""
                yield f"{module}.{name}{index}", vars(each)


class _Snapshot:
    """What matters of one space, laid out so that it is compared by loops in C."""

    def __init__(self, space: Mapping[str, Any], *, constants: bool) -> None:
        """``constants``: whether numbers and words count. PyTorch writes to its own (`torch.cuda._initialized`)."""
        items = {
            name: item
            for name, item in list(space.items())
            if _matters(name, item) and (constants or not isinstance(item, _PRIMITIVE))
        }
        self._names = tuple(items)
        self._items = tuple(items.values())
        self._functions = tuple(item for item in self._items if isinstance(item, types.FunctionType))
        self._bodies = tuple(tuple(map(part, self._functions)) for part in _BODY)

    def replaced(self, space: Mapping[str, Any]) -> list[str]:
        """Names."""
        bodies = (map(part, self._functions) for part in _BODY)
        if all(map(is_, map(space.get, self._names), self._items)) and all(
            all(map(is_, now, seen)) for now, seen in zip(bodies, self._bodies, strict=True)
        ):
            return []
        other_bodies = {
            id(function)
            for part, seen in zip(_BODY, self._bodies, strict=True)
            for function, original in zip(self._functions, seen, strict=True)
            if part(function) is not original
        }
        return [
            name
            for name, item in zip(self._names, self._items, strict=True)
            if id(item) in other_bodies or not _same(item, space.get(name))
        ]


_BODY = (attrgetter("__code__"), attrgetter("__defaults__"), attrgetter("__kwdefaults__"))
"""Of a function, what can be exchanged while it stays the same object."""


def _matters(name: str, item: Any) -> bool:
    if name.startswith("__") and name not in ("__init__", "__call__", "__torch_function__", "__eq__"):
        return False
    return callable(item) or isinstance(item, (property, staticmethod, classmethod, *_PRIMITIVE))


def _same(original: Any, now: Any) -> bool:
    """Numbers and words of one value may be two objects, and a module may count with them."""
    return original is now or (
        isinstance(original, _PRIMITIVE) and type(original) is type(now) and bool(original == now)
    )


def _dumps() -> dict[str, str]:
    """By operator, the dispatcher's words on what is registered for it."""
    dumps = {}
    for name in OPERATORS:
        try:
            dumps[name] = torch._C._dispatch_dump(f"aten::{name}")
        except RuntimeError:  # not an operator of this PyTorch
            continue
    return dumps


def _kernels(dump: str) -> tuple[str, ...]:
    """Where the kernels that matter were registered."""
    lines = (line.strip() for line in dump.splitlines())
    return tuple(line for line in lines if line.split(":")[0].split("[")[0].strip() in _KERNEL_KEYS)


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
