"""Source code under a private package name: what a tree calls itself is renamed where it says so.

Two states of one package in one process need two names. Only the tree's own names are renamed: its absolute imports
(at any depth, so lazy ones too), the names that it gives to the import system as text, and the namespaces under which
it registers operators with torch.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from dataclasses import dataclass

_TAKE_MODULE_NAME = ("import_module", "__import__", "find_spec", "files")
"""Functions of the import system whose first argument is a module's name."""

_TAKE_OPERATOR_NAME = ("Library", "custom_op", "triton_op", "define")
"""Functions of torch.library whose first argument is or begins with a namespace."""

_IMPLEMENTS_ONLY = "IMPL"
"""``torch.library.Library(namespace, "IMPL")`` adds to operators of others, which keep their name."""


@dataclass(frozen=True)
class Names:
    """What is renamed."""

    private: str
    """The package that everything lies in."""
    own: frozenset[str]
    """Top-level modules of the tree."""
    namespaces: frozenset[str] = frozenset()
    """Of torch's operators, that the tree defines."""

    def module(self, name: str) -> str:
        return f"{self.private}.{name}" if name.partition(".")[0] in self.own else name

    def namespace(self, name: str) -> str:
        return f"{name}_{self.private}" if name in self.namespaces else name

    def operator(self, name: str) -> str:
        namespace, colons, rest = name.partition("::")
        return f"{self.namespace(namespace)}{colons}{rest}"


def defined_namespaces(sources: Collection[str]) -> frozenset[str]:
    """The namespaces in which these sources define operators of torch."""
    namespaces = set()
    for source in sources:
        if not any(name in source for name in _TAKE_OPERATOR_NAME):
            continue
        try:
            tree = ast.parse(source)
        except SyntaxError:  # a file that is never imported is not in the way; one that is will say so
            continue
        for node in ast.walk(tree):
            namespace = _defined(node)
            if namespace:
                namespaces.add(namespace)
    return frozenset(namespaces)


def _defined(node: ast.AST) -> str:
    if not isinstance(node, ast.Call) or _called(node) not in _TAKE_OPERATOR_NAME:
        return ""
    texts = [each.value if isinstance(each, ast.Constant) else None for each in node.args]
    if not texts or not isinstance(texts[0], str) or _IMPLEMENTS_ONLY in texts[1:]:
        return ""
    namespace, colons, _ = texts[0].partition("::")
    return namespace if namespace.isidentifier() and (colons or _called(node) == "Library") else ""


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def rename(source: bytes, path: str, names: Names) -> ast.Module:
    """The syntax tree of a file with its own names renamed; line numbers are those of the file."""
    tree = ast.parse(source, path)
    _Renamer(names).visit(tree)
    return ast.fix_missing_locations(tree)


class _Renamer(ast.NodeTransformer):
    def __init__(self, names: Names) -> None:
        self._names = names

    def visit_Import(self, node: ast.Import) -> list[ast.stmt]:
        statements: list[ast.stmt] = []
        for item in node.names:
            target = self._names.module(item.name)
            statements.append(ast.Import([ast.alias(target, item.asname)]))
            if target != item.name and item.asname is None:
                # `import a.b` binds a, which is now an attribute of the private package.
                top = item.name.partition(".")[0]
                statements.append(ast.ImportFrom(self._names.private, [ast.alias(top)], 0))
        return [ast.copy_location(statement, node) for statement in statements]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        if node.level == 0 and node.module is not None:
            node.module = self._names.module(node.module)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            if _called(node) in _TAKE_MODULE_NAME:
                first.value = self._names.module(first.value)
            elif _called(node) in _TAKE_OPERATOR_NAME:
                first.value = self._names.namespace(first.value)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, str) and "::" in node.value:
            node.value = self._names.operator(node.value)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.Attribute) and node.value.attr == "ops":
            node.attr = self._names.namespace(node.attr)  # torch.ops.<namespace>
        return node
