"""Names say what they hold: a job, an estimate, a machine, and not how it was come by."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from module_graph import nodes_of

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "tools", "examples", "benchmarks")
VAGUE = {"found", "known", "thing", "stuff", "place", "info"}
"""Each was bound in up to two hundred functions, for anything at all."""
VERBS = {"place"}
"""Which a function may be called by: it puts something somewhere."""
WORD = re.compile(rf"\b(?:{'|'.join(VAGUE)})\b")
"""Only a file in which one stands is parsed: to parse all tests takes seconds."""


def bound_names(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Every variable, parameter, field, function, class and name of an import that a module binds, with its line."""
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name, node.lineno
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname, node.lineno
        elif (
            isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name not in VERBS
        ):
            yield node.name, node.lineno


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("found = 1", ["found"]),
        ("def f(known, *, thing=2): pass", ["known", "thing"]),
        ("[x for found in y]", ["found"]),
        ("with a as found: pass", ["found"]),
        ("if found := f(): pass", ["found"]),
        ("import a as found", ["found"]),
        ("try: pass\nexcept E as found: pass", ["found"]),
        ("def found(): pass", ["found"]),
        ("async def known(): pass", ["known"]),
        ("class info: pass", ["info"]),
        ("a.found", []),
        ("print(found)", []),
    ],
)
def test_every_way_to_bind_a_name_is_seen(source: str, names: list[str]) -> None:
    assert [name for name, _ in bound_names(ast.walk(ast.parse(source))) if name in VAGUE] == names


def test_no_name_hides_what_it_holds() -> None:
    vague = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if WORD.search(path.read_text(encoding="utf-8"))
        for name, line in bound_names(nodes_of(path))
        if name in VAGUE
    ]
    assert not vague, "name the thing (machine, job, estimate, plan):\n" + "\n".join(vague)
