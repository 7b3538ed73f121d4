"""What is imported is declared, and what is declared is used."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from module_graph import nodes_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {"cudadent42", "flashmoe_science"}

DISTRIBUTIONS = {
    "cuda.bindings": "cuda-bindings",
    "cuda.pathfinder": "cuda-pathfinder",
    "pynvml": "nvidia-ml-py",
}
"""Where a module's distribution has another name."""

NOT_OURS = {
    "flash_attn": "a rival, where its user installed it",
    "flash_attn_interface": "a rival, where its user installed it",
    "flashinfer": "a rival, where its user installed it",
    "cudnn": "a rival, where its user installed it",
    "liger_kernel": "a rival, where its user installed it",
    "ncu_report": "comes with Nsight Compute",
    "pip": "asked for, to name the command that installs the rest",
    "triton": "asked for; comes with torch",
    "xformers": "a rival, where its user installed it",
}
"""Modules that are imported where they are there."""

NOT_IMPORTED = {
    "nvidia-cuda-nvrtc": "a library, which cuda-bindings loads",
    "nvidia-cuda-nvrtc-cu12": "a library, which cuda-bindings loads",
    "nvidia-cuda-nvdisasm": "a program",
    "psycopg": "SQLAlchemy imports it by the URL of a database",
    "skypilot": "a program",
}
"""What an extra brings without being imported by name, and the base never."""


@functools.cache
def imported(package: str) -> frozenset[str]:
    """Third-party modules that a package imports, lazily or not, or looks for by name."""
    return frozenset(
        name
        for path in (ROOT / "src" / package).rglob("*.py")
        if "@" not in path.name  # of a template
        for node in nodes_of(path)
        for name in names(node)
        if is_third_party(name)
    )


def names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        function = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if function in ("import_module", "find_spec") and isinstance(node.args[0].value, str):
            yield node.args[0].value


def is_third_party(module: str) -> bool:
    top = module.partition(".")[0]
    return top not in sys.stdlib_module_names and top not in OURS


def distribution(module: str) -> str:
    top = module.partition(".")[0]
    two = ".".join(module.split(".")[:2])
    return DISTRIBUTIONS.get(two) or DISTRIBUTIONS.get(top) or top


def required(requirements: list[str]) -> set[str]:
    return {re.split(r"[ <>=!\[;]", requirement)[0] for requirement in requirements}


BASE = required(PROJECT["dependencies"])
EXTRAS = {name: required(listed) for name, listed in PROJECT["optional-dependencies"].items()}


def test_the_kernels_import_what_their_installation_brings() -> None:
    """But for a compiler, which is an extra, and looked for, and for models, which one package is about."""
    used = {distribution(module) for module in imported("flashmoe_science")}
    assert used - {"ziglang", "transformers"} == BASE
    assert "ziglang" in EXTRAS["compiler"]
    assert "transformers" in EXTRAS["transformers"]


def test_only_the_package_about_models_imports_them() -> None:
    """So that the kernels are imported without it."""
    outside = [
        path
        for path in (ROOT / "src/flashmoe_science").rglob("*.py")
        if "huggingface" not in path.parts
        and any(name.partition(".")[0] == "transformers" for node in nodes_of(path) for name in names(node))
    ]
    assert outside == []


def test_the_lab_imports_what_is_declared() -> None:
    modules = {module for module in imported("cudadent42") if module.partition(".")[0] not in NOT_OURS}
    assert {distribution(module) for module in modules} <= BASE.union(*EXTRAS.values())


def test_what_every_command_of_the_lab_needs_is_in_its_extra() -> None:
    assert {"typer", "rich", "matplotlib", "jinja2"} <= EXTRAS["lab"]
    assert not EXTRAS["lab"] & BASE


@pytest.mark.parametrize("extra", EXTRAS)
def test_everything_declared_is_used(extra: str) -> None:
    used = {distribution(module) for package in OURS for module in imported(package)}
    assert EXTRAS[extra] - set(NOT_IMPORTED) <= used


def test_the_tables_name_nothing_that_is_gone() -> None:
    tops = {module.partition(".")[0] for package in OURS for module in imported(package)}
    rivals = (ROOT / "src/cudadent42/operations").rglob("implementations.py")
    text = "".join(path.read_text() for path in rivals)
    assert [name for name in NOT_OURS if name not in tops and f'"{name}"' not in text] == []
    assert set(NOT_IMPORTED) <= set().union(*EXTRAS.values())


def test_the_page_has_every_dependency_and_every_extra_of_ours() -> None:
    page = (ROOT / "docs/dependencies.md").read_text(encoding="utf-8")
    rows = "\n".join(line for line in page.splitlines() if line.startswith("|"))
    assert [extra for extra in EXTRAS if f"| `{extra}` |" not in rows] == []
    assert [name for name in BASE.union(*EXTRAS.values()) if f"`{name}" not in rows] == []


def test_imports_in_functions_and_by_name_count() -> None:
    source = 'def f():\n    import a.b\n    from c.d import e\n    importlib.import_module("g")\n    find_spec("h.i")\n'
    assert [name for node in ast.walk(ast.parse(source)) for name in names(node)] == [
        "a.b",
        "c.d.e",
        "g",
        "h.i",
    ]
