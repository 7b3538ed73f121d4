"""``docs/environment.md`` names every variable that the code reads, and none that it does not."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from cudadent42.flows import doctor
from cudadent42.runs.run_folder import _RECORDED_VARIABLES
from flashmoe_science.cuda import key_lists, steady
from flashmoe_science.cuda.varlen import append
from module_graph import files_of, nodes_of, parsed

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/environment.md").read_text(encoding="utf-8")
FILES = {**files_of("flashmoe_science"), **files_of("cudadent42")}
SCRIPTS = (
    ROOT / "run.sh",
    ROOT / "test.sh",
    ROOT / ".ci/run",
    *(ROOT / "scripts").glob("*.sh"),
    *(ROOT / "tools").glob("*.sh"),
    *(ROOT / "src").rglob("*.sh"),
)
OURS = re.compile(r"\b(?:CUDADENT42|FLASHMOE)_[A-Z_0-9]+\b")

OF_PARAMETERS: dict[tuple[str, str], set[str]] = {
    ("cudadent42.base.folders", "variable"): {"XDG_CONFIG_HOME", "XDG_STATE_HOME"},
    ("flashmoe_science.cuda.choice", "variable"): {
        module.OVERRIDE_VARIABLE for module in (append, key_lists, steady)
    },
    ("flashmoe_science.cuda.choice", "self.override_variable"): {
        "FLASHMOE_CUDA_KERNEL",
        "FLASHMOE_CUDA_BACKWARD",
        "FLASHMOE_CUDA_VARLEN",
        "FLASHMOE_MOE_KERNEL",
    },
    ("cudadent42.flows.doctor", "name"): set(doctor._OF_A_PROCESSOR),
    ("cudadent42.integrity.process_settings", "name"): set(),  # all, to be put back as they were
}
"""What is read under a name that its caller gives: module and expression, and the variables."""

IN_PROC = {"CUDADENT42_WORKER"}
"""What is read of other processes."""

SET_FOR_SCRIPTS = {
    *(
        "NAME_WIDTH",
        "MAX_LOAD_SHARE",
        "GOOD_DISK",
        "MIN_DISK",
        "GOOD_MEMORY",
        "MIN_MEMORY",
        "MIN_DRIVER_CUDA",
    ),
    *("LIBCUDA_PLACES", "PACKAGES"),
}
"""Of the shell form of preflight: what `preflight.shell_form` writes in front of its parts."""

OF_THE_SHELL = {"BASH_SOURCE", "IFS", "PATH", "PWD"}

Bound = dict[str, list[ast.expr]]


def is_environment(node: ast.expr) -> bool:
    return getattr(node, "attr", getattr(node, "id", "")) in ("environ", "environb")


def reads(nodes: Iterable[ast.AST]) -> Iterator[ast.expr]:
    """The names, as expressions, that a module asks the environment for."""
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr == "getenv" or (
                node.func.attr in ("get", "pop", "setdefault") and is_environment(node.func.value)
            ):
                yield node.args[0]
        elif isinstance(node, ast.Subscript) and is_environment(node.value):
            if isinstance(node.ctx, ast.Load):
                yield node.slice
        elif isinstance(node, ast.Compare) and is_environment(node.comparators[-1]):
            yield node.left


def bound_in(module: str) -> Bound:
    """By name, what a module binds it to: by an assignment on its top level, an import from another, or a loop."""
    bound: Bound = {}
    for node in nodes_of(FILES[module]):
        if isinstance(node, (ast.For, ast.comprehension)) and isinstance(node.target, ast.Name):
            bound.setdefault(node.target.id, []).append(node.iter)
    for node in parsed(FILES[module]).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            bound.setdefault(node.targets[0].id, []).append(node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            bound.setdefault(node.target.id, []).append(node.value)
    return bound


def imported_from(module: str, name: str) -> tuple[str, str] | None:
    for node in nodes_of(FILES[module]):
        if isinstance(node, ast.ImportFrom) and node.module in FILES:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return node.module, alias.name
    return None


def values(module: str, node: ast.expr) -> set[str]:
    """The texts that an expression can be. Fails for one that cannot be told: it belongs into a table above."""
    if isinstance(node, ast.Constant):
        return {node.value.decode() if isinstance(node.value, bytes) else str(node.value)}
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return set().union(*(values(module, each) for each in node.elts))
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("frozenset", "set", "tuple"):
        return values(module, node.args[0])
    if (module, ast.unparse(node)) in OF_PARAMETERS:
        return OF_PARAMETERS[module, ast.unparse(node)]
    assert isinstance(node, ast.Name), (
        f"{module} reads the variable {ast.unparse(node)}; name it in OF_PARAMETERS"
    )
    if source := imported_from(module, node.id):
        return values(source[0], ast.Name(source[1]))
    bound = bound_in(module).get(node.id)
    assert bound, f"{module} reads the variable {node.id}; name it in OF_PARAMETERS"
    return set().union(*(values(module, each) for each in bound))


def read_by_scripts() -> set[str]:
    """Variables that no script sets before it reads them, or reads with a default."""
    names: set[str] = set()
    for path in SCRIPTS:
        lines = path.read_text(encoding="utf-8").splitlines()
        text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
        own = set(re.findall(r"(?:^|[\s;&|(])([A-Z][A-Z0-9_]+)=", text))
        with_default = set(re.findall(r"\$\{([A-Z][A-Z0-9_]+):?[-+=?]", text))
        names |= set(re.findall(r"\$\{?([A-Z][A-Z0-9_]+)", text)) - (own - with_default)
    return names - SET_FOR_SCRIPTS - OF_THE_SHELL


@functools.cache
def read_by_the_code() -> set[str]:
    names = set(_RECORDED_VARIABLES) | IN_PROC
    for module, path in FILES.items():
        for node in reads(nodes_of(path)):
            names |= values(module, node)
    return names


@pytest.mark.parametrize(
    "source",
    [
        "os.environ.get('A')",
        "environ.get('A', '')",
        "os.environ['A']",
        "os.environ.pop('A', None)",
        "os.environ.setdefault('A', '1')",
        "os.getenv('A')",
        "'A' in os.environ",
        "'A' not in os.environ",
        "os.environb[b'A']",
    ],
)
def test_every_way_to_read_a_variable_is_seen(source: str) -> None:
    (node,) = reads(ast.walk(ast.parse(source)))
    assert values("cudadent42", node) == {"A"}


def test_what_is_only_set_is_not_read() -> None:
    assert list(reads(ast.walk(ast.parse("os.environ['A'] = '1'\ndel os.environ['A']\n{}.get('A')")))) == []


def test_every_variable_that_is_read_stands_on_the_page() -> None:
    missing = {name for name in read_by_the_code() | read_by_scripts() if f"`{name}`" not in PAGE}
    assert not missing


def test_the_page_names_no_variable_of_ours_that_nothing_reads() -> None:
    assert set(OURS.findall(PAGE)) <= read_by_the_code() | read_by_scripts()


def test_a_variable_has_one_row_of_each_table() -> None:
    for section in PAGE.split("\n## "):
        rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
        names = [name for row in rows for name in re.findall(r"`([A-Z0-9_]+)`", row)]
        assert len(names) == len(set(names))


def test_a_run_records_every_variable_that_chooses_kernels() -> None:
    choose = {
        name
        for path in (ROOT / "src/flashmoe_science").rglob("*.py")
        for name in re.findall(r"""OVERRIDE_VARIABLE = "([A-Z0-9_]+)\"""", path.read_text(encoding="utf-8"))
    }
    assert "FLASHMOE_MOE_BACKWARD" in choose
    assert choose <= set(_RECORDED_VARIABLES)
    assert OF_PARAMETERS["flashmoe_science.cuda.choice", "self.override_variable"] <= choose
