"""What the modules of `cudadent42` import, lazily or not: parts that can be understood one after the other."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"
FILES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (SOURCE / "cudadent42").rglob("*.py")
}


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(node: ast.AST) -> Iterator[str]:
    """Modules of the package that are imported at any time, but for type checking."""
    if is_for_types(node):
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in FILES)
    elif isinstance(node, ast.ImportFrom) and node.module in FILES:
        inner = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name if name in FILES else node.module for name in inner)
    for child in ast.iter_child_nodes(node):
        yield from imports(child)


def reached(start: str) -> set[str]:
    """All that a module needs, itself only where it comes round."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for name in imports(ast.parse(FILES[waiting.pop()].read_text(encoding="utf-8"))):
            if name not in found:
                found.add(name)
                waiting.append(name)
    return found


@pytest.mark.parametrize("module", ["cudadent42.decisions.gates", "cudadent42.model.implementations"])
def test_what_others_are_built_on_needs_none_of_them(module: str) -> None:
    assert module in FILES
    assert module not in reached(module)


def test_the_contract_of_implementations_knows_none() -> None:
    known = reached("cudadent42.model.implementations")
    assert not [name for name in known if name.startswith(("cudadent42.operations", "cudadent42.native"))]
    assert {"cudadent42.native.implementation", "cudadent42.versions.version"} <= reached(
        "cudadent42.registry"
    )


def test_a_run_on_a_machine_at_hand_does_not_wait_for_pytorch() -> None:
    """What is checked and agreed on before it, which takes longer than all that is said to the machine otherwise."""
    program = """
import sys
from cudadent42.commands.elsewhere import Asked, check
from cudadent42.commands.machines import agreed_terms
from cudadent42.plan import Choices
from cudadent42.remote.core.address import parse
from cudadent42.remote.core.hosts import Remote

asked = Asked("there", Choices(suite="small"), "cpu", None, None, (), False, None, False)
check(asked)
agreed_terms(Remote("there", parse("ssh://there")), asked.choices, "cpu", None, None, False, False)
print(sorted({"torch", "scipy", "sqlalchemy"} & sys.modules.keys()))
"""
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, cwd=SOURCE.parent, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
