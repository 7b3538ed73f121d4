"""What the modules of a package are made of, and what they import from it, as a graph: for the tests of its layers.

Ten files of tests look at every module, so each is parsed once in a process.
"""

from __future__ import annotations

import ast
import functools
import gc
from collections.abc import Iterable, Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"


@functools.cache
def parsed(path: Path) -> ast.Module:
    """What is parsed stays, and is not looked through for garbage: that takes longer than to parse it."""
    looks = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        gc.freeze()
        if looks:
            gc.enable()


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """As `ast.walk` gives them."""
    return tuple(ast.walk(parsed(path)))


def files_of(package: str) -> dict[str, Path]:
    """By module, its file; templates are none."""
    return {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (SOURCE / package).rglob("*.py")
        if "@" not in path.name
    }


def named_modules(node: ast.Import | ast.ImportFrom, files: dict[str, Path]) -> list[str]:
    """Those of ``files`` that an import names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name in files]
    if node.module not in files:
        return []
    inner = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name if name in files else node.module for name in inner]


def spelled_module(node: ast.Call, module: str) -> str:
    """What ``import_module("a.b")`` or ``import_module(f"{__name__}.b")`` names in a module; empty for what only a run
    knows."""
    function = getattr(node.func, "attr", getattr(node.func, "id", ""))
    if function != "import_module" or not node.args:
        return ""
    name = node.args[0]
    parts = name.values if isinstance(name, ast.JoinedStr) else [name]
    texts = []
    for part in parts:
        if isinstance(part, ast.Constant):
            texts.append(str(part.value))
        elif (
            isinstance(part, ast.FormattedValue)
            and isinstance(part.value, ast.Name)
            and part.value.id == "__name__"
        ):
            texts.append(module)
        else:
            return ""
    return "".join(texts)


def mentioned(nodes: Iterable[ast.AST], files: dict[str, Path], module: str) -> Iterator[str]:
    """Modules that a module's imports name: lazy ones, those for type checking, and those by ``import_module``."""
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from named_modules(node, files)
        elif isinstance(node, ast.Call) and (name := spelled_module(node, module)) in files:
            yield name


def arrows(files: dict[str, Path]) -> dict[str, set[str]]:
    """By module, the modules that it imports."""
    return {name: set(mentioned(nodes_of(path), files, name)) for name, path in files.items()}


def circular(graph: dict[str, set[str]]) -> list[str]:
    """The modules that need themselves."""
    return [start for start in graph if start in _reached(graph, start)]


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += graph[name]
    return reached


def part_of(module: str, layers: dict[str, str]) -> str:
    """The row that a module belongs to: the longest that is its name or a package around it, from below the root."""
    _, *names = module.split(".")
    for end in range(len(names), 0, -1):
        if (name := ".".join(names[:end])) in layers:
            return name
    return ".".join(names) or module


def upward_rows(layers: dict[str, str]) -> list[tuple[str, str]]:
    """Rows with one that they name and that does not stand above them in the table."""
    order = list(layers)
    return [
        (name, other)
        for name, row in layers.items()
        for other in row.split()
        if other not in order[: order.index(name)]
    ]


def forbidden(graph: dict[str, set[str]], layers: dict[str, str]) -> dict[tuple[str, str], list[str]]:
    """Arrows between parts that no row allows, with the imports that they are made of."""
    refused: dict[tuple[str, str], list[str]] = {}
    for module, others in graph.items():
        for other in sorted(others):
            arrow = part_of(module, layers), part_of(other, layers)
            if arrow[0] != arrow[1] and arrow[1] not in layers.get(arrow[0], "").split():
                refused.setdefault(arrow, []).append(f"{module} imports {other}")
    return refused
