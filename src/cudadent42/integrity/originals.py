"""Whether the functions that measure and judge are still those that were imported.

Of this lab's modules everything counts: functions with their code and defaults, classes with their methods, constants.
Of PyTorch, functions and methods, and the kernels behind the operators that baselines and references call.
"""

from __future__ import annotations

import dataclasses
import importlib
import marshal
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch

from cudadent42.model.implementations import OUR_PACKAGE as OURS

LAB = "cudadent42"

CLOCKS = ("time", "gc", "statistics", "resource", "os", "signal", "json")
"""Modules of Python's own whose functions a measurement rests on."""

TOOLS = (
    *("builtins", "random", "secrets", "math", "hashlib", "itertools", "operator", "functools"),
    *("contextlib", "dataclasses", "ctypes"),
)
"""Those that clocks, chance and judgement are made with. Their functions count, and not their state."""

TOOL_CLASSES = ("random.Random", "pathlib.Path")

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

    def __init__(self, *, kernels: bool = True) -> None:
        """``kernels``: whether this project's count, as they do where one of them is raced."""
        self._of_kernels = kernels
        self._spaces: dict[str, Mapping[str, Any]] = {}
        self._seen: dict[str, _Snapshot] = {}
        self._modules: dict[str, Mapping[str, Any]] = {}
        self.include_new()
        self._dumps = _dumps()
        self._modes = _modes()

    def include_new(self, *, kernels: bool = False) -> None:
        """What was imported since, as it is now; ``kernels``: from here on with this project's."""
        self._of_kernels = self._of_kernels or kernels
        for label, space in _spaces(kernels=self._of_kernels):
            if label not in self._spaces:
                self._spaces[label] = space
                self._seen[label] = _Snapshot(
                    space, constants=_has_constants(label), contents=_is_of(LAB, label)
                )
                if isinstance(space, dict) and label in sys.modules:
                    self._modules[label] = space
        self._bodies = _Bodies(self._seen.values())

    def rewritten(self) -> list[Replaced]:
        """The lab's constants and functions that are the same objects with other contents: memory that somebody wrote
        to. Ten times what ``replaced`` takes."""
        return [
            Replaced(f"{label}.{name}", True)
            for label, space in self._spaces.items()
            if not _is_of_others(label)
            for name in self._seen[label].rewritten()
        ]

    def replaced(self) -> list[Replaced]:
        """What is not as it was. A millisecond or two where everything is."""
        replaced = []
        bodies_stand = self._bodies.stand()
        for label, space in self._spaces.items():
            seen = self._seen[label]
            if bodies_stand and seen.stands(space):
                continue
            if names := seen.replaced(space):
                of_lab = not _is_of_others(label)
                replaced += [
                    Replaced(f"{label}.{name}", of_lab)
                    for name in names
                    if f"{label}.{name}" not in _BY_TORCH
                ]
        replaced += [
            Replaced(f"the kernel of torch.ops.aten.{name}", False)
            for name, dump in _dumps().items()
            if dump != self._dumps.get(name) and _kernels(dump) != _kernels(self._dumps.get(name, ""))
        ]
        if _modes() != self._modes:
            replaced.append(Replaced("torch's stack of function and dispatch modes", False))
        replaced += [Replaced(f"sys.modules[{name!r}]", True) for name in _exchanged(self._modules)]
        return replaced


def _spaces(*, kernels: bool) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Names and what they mean, by where they are."""
    for name, module in list(sys.modules.items()):
        # Cython, for one, has objects without a name stand for its modules. In a lab's module's place: `_exchanged`.
        if not issubclass(type(module), types.ModuleType):
            continue
        if _is_of(LAB, name) or _is_of_lab(module):
            yield name, vars(module)
            for item in list(vars(module).values()):
                if isinstance(item, type) and item.__module__ == name:
                    yield f"{name}.{item.__qualname__}", item.__dict__
            yield from _records(name, vars(module))
        elif kernels and _is_of(OURS, name):
            yield name, vars(module)
    for name in (*CLOCKS, *TOOLS):
        yield name, vars(importlib.import_module(name))
    for label in TOOL_CLASSES:
        module_name, _, class_name = label.partition(".")
        yield label, getattr(importlib.import_module(module_name), class_name).__dict__
    for name in TORCH:
        if name in sys.modules:
            yield name, vars(sys.modules[name])
    for name in TORCH_CLASSES:
        owner: Any = torch
        for part in name.split("."):
            owner = getattr(owner, part)
        yield f"torch.{name}", owner.__dict__


def _is_of(package: str, label: str) -> bool:
    return label == package or label.startswith(f"{package}.")


def _is_of_others(label: str) -> bool:
    """PyTorch's or this project's kernels': what a baseline calls."""
    return _is_of("torch", label) or _is_of(OURS, label)


def _has_constants(label: str) -> bool:
    """Whether numbers and words of a space never change. Kernels and Python's own modules count with theirs."""
    return not _is_of_others(label) and label.partition(".")[0] not in TOOLS


def _is_of_lab(module: types.ModuleType) -> bool:
    """Whether it is one of the lab's that was started as a program."""
    names = vars(module)
    return names.get("__name__") == "__main__" and str(getattr(names.get("__spec__"), "name", "")).startswith(
        f"{LAB}."
    )


def _records(module: str, space: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The lab's records that a module holds, such as its implementations: frozen ones can be written to as well."""
    for name, item in list(space.items()):
        for number, each in enumerate(item if isinstance(item, tuple) else (item,)):
            if dataclasses.is_dataclass(each) and not isinstance(each, type) and hasattr(each, "__dict__"):
                index = f"[{number}]" if isinstance(item, tuple) else ""
                yield f"{module}.{name}{index}", vars(each)


class _Snapshot:
    """What matters of one space, laid out so that it is compared by loops in C."""

    def __init__(self, space: Mapping[str, Any], *, constants: bool, contents: bool) -> None:
        """``constants``: whether numbers and words count. PyTorch writes to its own (`torch.cuda._initialized`).
        ``contents``: whether ``rewritten`` can tell."""
        items = {
            name: item
            for name, item in list(space.items())
            if _matters(name, item) and (constants or not isinstance(item, _PRIMITIVE))
        }
        self._names = tuple(items)
        self._items = tuple(items.values())
        self._bodies = {
            name: _body(item) for name, item in items.items() if isinstance(item, types.FunctionType)
        }
        self._read = itemgetter(*self._names) if len(items) > 1 else None
        self._contents = {name: _contents(item) for name, item in items.items()} if contents else {}

    def rewritten(self) -> list[str]:
        """Names of items that are what they were by identity alone."""
        items = zip(self._names, self._items, strict=True)
        return [
            name for name, item in items if name in self._contents and _contents(item) != self._contents[name]
        ]

    def bodies(self) -> Iterator[tuple[types.FunctionType, tuple[Any, ...]]]:
        """Functions, and what they were made of."""
        for name, item in zip(self._names, self._items, strict=True):
            if name in self._bodies:
                yield item, self._bodies[name]

    def stands(self, space: Mapping[str, Any]) -> bool:
        """Whether each name means the same object; of functions' parts it says nothing."""
        if self._read is None:
            return all(map(is_, map(space.get, self._names), self._items))
        try:
            return all(map(is_, self._read(space), self._items))
        except KeyError:
            return False

    def replaced(self, space: Mapping[str, Any]) -> list[str]:
        """Names."""
        return [
            name
            for name, item in zip(self._names, self._items, strict=True)
            if not _same(item, space.get(name))
            or (name in self._bodies and not all(map(is_, _body(item), self._bodies[name])))
        ]


class _Bodies:
    """What many functions are made of, laid out so that it is compared by loops in C."""

    def __init__(self, snapshots: Iterable[_Snapshot]) -> None:
        seen: dict[int, tuple[types.FunctionType, tuple[Any, ...]]] = {}
        for snapshot in snapshots:
            for function, body in snapshot.bodies():
                seen.setdefault(id(function), (function, body))
        self._functions = tuple(function for function, _ in seen.values())
        self._parts = tuple(zip(*(body for _, body in seen.values()), strict=True))

    def stand(self) -> bool:
        """Whether each is made of the same."""
        return all(
            all(map(is_, map(part, self._functions), seen))
            for part, seen in zip(_PARTS, self._parts, strict=True)
        )


_PARTS = (attrgetter("__code__"), attrgetter("__defaults__"), attrgetter("__kwdefaults__"))
"""Of a function, what can be exchanged while it stays the same object."""


def _body(function: types.FunctionType) -> tuple[Any, ...]:
    return tuple(part(function) for part in _PARTS)


_WITHOUT_REFERENCES = 2
"""Of marshal's formats, the last that does not depend on who else holds an object."""


def _contents(item: Any) -> bytes:
    """Of a number, words or a function's code, in memory of their own; nothing of other things."""
    if isinstance(item, (staticmethod, classmethod)):
        item = item.__func__
    elif isinstance(item, property):
        item = item.fget
    whole = item.__code__ if isinstance(item, types.FunctionType) else item
    if not isinstance(whole, (types.CodeType, bool, int, float, str, bytes)):
        return b""
    try:
        return marshal.dumps(whole, _WITHOUT_REFERENCES)
    except ValueError:  # an enum's member is a number too, and none of marshal's
        return b""


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


def _modes() -> tuple[int, int, bool]:
    """Depths of the stacks of modes that see every call of PyTorch's, and whether what autograd saves is seen."""
    return (
        int(torch._C._len_torch_function_stack()),
        int(torch._C._len_torch_dispatch_stack()),
        torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
    )


def _exchanged(modules: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Modules of which another stands in ``sys.modules`` now."""
    return [
        name
        for name, space in modules.items()
        if (module := sys.modules.get(name)) is not None and getattr(module, "__dict__", None) is not space
    ]
