"""What the modules of `cudadent42` import, lazily or not: parts that can be understood one after the other.

``LAYERS`` is the layout of the lab. CONTRIBUTING.md says what it is for.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from module_graph import (
    SOURCE,
    arrows,
    circular,
    files_of,
    forbidden,
    named_modules,
    nodes_of,
    parsed,
    part_of,
    upward_rows,
)

FILES = files_of("cudadent42")

OPERATIONS = "cudadent42.operations"

FOLDERS = [
    path.name for path in (SOURCE / "cudadent42/operations").iterdir() if (path / "__init__.py").is_file()
]

_BELOW_STAGES = (
    "version base model sandbox decisions preflight operations timing native runs registry correctness profiles "
    "integrity"
)
"""A stage may use all of these, and no stage."""

LAYERS = {
    "version": "",
    "base": "",
    "model": "base",
    "sandbox": "base model",
    "cost": "base",
    "decisions": "base model",
    "preflight": "base model sandbox",
    "timing": "model",
    "operations": "base model",
    "suites": "base model operations",
    "correctness": "model operations",
    "integrity": "base model timing operations correctness",
    "native": "base model sandbox operations suites correctness",
    "runs": "version base model decisions operations native",
    "recording": "base model timing decisions runs",
    "cudadent42": "version recording",
    "versions": "base model operations native",
    "registry": "base model operations native versions",
    "plan": "base model decisions suites native",
    "profiles": "base",
    "patterns": "base model runs",
    "ledger": "base model cost runs",
    "stages.build": _BELOW_STAGES,
    "stages.verify": _BELOW_STAGES,
    "stages.bench": _BELOW_STAGES,
    "stages.profile": _BELOW_STAGES,
    "stages.gates": _BELOW_STAGES,
    "stages.report": _BELOW_STAGES,
    "worker": "base model sandbox timing operations integrity versions registry stages.verify stages.bench",
    "audit": "base model sandbox timing operations correctness decisions registry worker",
    "flows": f"{_BELOW_STAGES} versions plan ledger stages.build stages.verify stages.bench stages.profile "
    "stages.gates stages.report worker audit",
    "fleet": f"{_BELOW_STAGES} cudadent42 versions plan stages.gates stages.report worker flows",
    "scaffold": "base",
    "tune": f"{_BELOW_STAGES} plan stages.report flows fleet",
    "session": f"{_BELOW_STAGES} versions plan cost patterns stages.gates stages.report flows",
    "schemas": "base model decisions runs profiles flows session",
    "agents": "version base model decisions cost preflight runs plan profiles ledger worker flows",
    "remote.core": "base model cost preflight runs registry plan ledger stages.build flows",
    "remote.providers": "base cost runs remote.core",
    "remote.flows": "base model cost runs registry plan stages.gates flows fleet remote.core remote.providers",
    "remote": "",
    "stages": "",
    "commands": f"{_BELOW_STAGES} suites plan cost patterns ledger stages.build stages.gates stages.report flows "
    "scaffold session recording schemas agents tune fleet remote.core remote.providers remote.flows",
    "__main__": "base preflight commands",
}
"""Which part of `cudadent42` may import which, from the bottom up: a row names earlier rows only.

``cudadent42`` is what the package itself has: its version, and ``capture``. ``stages`` and ``remote`` are folders of
parts, and import nothing themselves.
"""


def part(module: str) -> str:
    return part_of(module, LAYERS)


def test_rows_name_earlier_rows_only() -> None:
    """So there is no circle of parts."""
    assert upward_rows(LAYERS) == []
    stages = [name for name in LAYERS if name.startswith("stages.")]
    assert len(stages) > 1
    assert not [name for name in stages if set(stages) & set(LAYERS[name].split())]


def test_nothing_is_imported_but_what_its_row_allows() -> None:
    """There is no exception."""
    assert forbidden(arrows(FILES), LAYERS) == {}


BOUND_TO_AN_OPERATION = {
    ("native", "attention"): "the C interface of kernels in files of their own is attention's",
    ("operations.attention_backward", "attention"): "a case is the forward pass's, with an incoming gradient",
    (
        "operations.attention_training_step",
        "attention_backward",
    ): "the backward pass, with the forward before it",
    (
        "operations.attention_varlen",
        "attention",
    ): "one rule of how float64 weighs values, NaN and zero among them",
    ("operations.moe_backward", "moe"): "a case is the forward pass's, with an incoming gradient",
    ("operations.moe_training_step", "moe_backward"): "the backward pass, with the forward before it",
}
"""What imports the folder of another operation, each with its reason. All else asks its definition."""


def owner(module: str) -> str:
    """The part of a module; of an operation's own modules, its folder."""
    names = module.split(".")
    in_folder = module.startswith(f"{OPERATIONS}.") and names[2] in FOLDERS
    return ".".join(names[1:3]) if in_folder else part(module)


def operations_used() -> set[tuple[str, str]]:
    owners = {(owner(module), owner(other)) for module, others in arrows(FILES).items() for other in others}
    return {
        (user, used.removeprefix("operations."))
        for user, used in owners
        if used.startswith("operations.") and user != used
    }


def test_what_depends_on_the_operation_is_in_its_folder() -> None:
    assert operations_used() == set(BOUND_TO_AN_OPERATION)


def test_operations_that_build_on_others_make_no_circle() -> None:
    graph: dict[str, set[str]] = {folder: set() for folder in FOLDERS}
    for user, used in operations_used():
        graph.setdefault(user.removeprefix("operations."), set()).add(used)
    assert circular(graph) == []


def test_providers_of_machines_are_named_in_their_list_alone() -> None:
    """So that a new one opens its folder and that list."""
    providers = "cudadent42.remote.providers"
    outside = [
        f"{module} imports {other}"
        for module, others in arrows(FILES).items()
        if not module.startswith(providers)
        for other in others
        if other.startswith(f"{providers}.")
    ]
    assert outside == []
    own = {other.split(".")[3] for other in arrows(FILES)[providers] if other.startswith(f"{providers}.")}
    assert own == {path.stem for path in (SOURCE / "cudadent42/remote/providers").iterdir()} - {
        "__init__",
        "__pycache__",
    }


def test_every_part_has_a_row_and_every_row_a_use() -> None:
    """Of what all stages may use, each is used by one of them."""
    assert {part(module) for module in FILES} == set(LAYERS)
    used: dict[str, set[str]] = {name: set() for name in LAYERS}
    for module, others in arrows(FILES).items():
        used[part(module)] |= {part(other) for other in others}
    common = set(_BELOW_STAGES.split())
    idle = {
        name: allowed - used[name] - (common if common <= allowed else set())
        for name, allowed in ((name, set(row.split())) for name, row in LAYERS.items())
    }
    assert {name: rest for name, rest in idle.items() if rest} == {}
    assert common <= set().union(*(used[name] for name in LAYERS if name.startswith("stages.")))


def test_the_table_of_parts_in_contributing_names_every_package() -> None:
    """A row may name a folder for all parts in it, and parts of a folder for the folder."""
    page = (SOURCE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = page.partition("| part | is |\n| --- | --- |\n")[2].partition("\n\n")[0].splitlines()
    named = {name for row in rows for name in re.findall(r"`([\w.]+)`", row.split("|")[1])}
    packages = {
        name for name in LAYERS if (SOURCE / "cudadent42" / name.replace(".", "/") / "__init__.py").is_file()
    }
    assert len(packages) > 30
    related = {
        name
        for name in packages
        if any(f"{each}.".startswith(f"{name}.") or name.startswith(f"{each}.") for each in named)
    }
    assert packages - related == set()
    assert named - set(LAYERS) == set()


def test_no_module_needs_itself() -> None:
    """Lazily or not: a circle of modules can only be understood as a whole."""
    assert circular(arrows(FILES)) == []


def test_the_kernels_know_nothing_of_the_lab() -> None:
    for path in (SOURCE / "flashmoe_science").rglob("*.py"):
        for node in nodes_of(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] == "cudadent42"], path


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(node: ast.AST) -> Iterator[str]:
    """Modules of the package that are imported at any time, but for type checking."""
    if is_for_types(node):
        return
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from named_modules(node, FILES)
    for child in ast.iter_child_nodes(node):
        yield from imports(child)


def reached(start: str) -> set[str]:
    """All that a module needs, itself only where it comes round."""
    modules: set[str] = set()
    waiting = [start]
    while waiting:
        for name in imports(parsed(FILES[waiting.pop()])):
            if name not in modules:
                modules.add(name)
                waiting.append(name)
    return modules


@pytest.mark.parametrize("module", ["cudadent42.decisions.gates", "cudadent42.model.implementations"])
def test_what_others_are_built_on_needs_none_of_them(module: str) -> None:
    assert module in FILES
    assert module not in reached(module)


def test_the_contract_of_implementations_knows_none() -> None:
    modules = reached("cudadent42.model.implementations")
    assert not [name for name in modules if name.startswith(("cudadent42.operations", "cudadent42.native"))]
    assert {"cudadent42.native.implementation", "cudadent42.versions.version"} <= reached(
        "cudadent42.registry"
    )


def test_a_run_on_a_machine_at_hand_does_not_wait_for_pytorch() -> None:
    """What is checked and agreed on before it, which takes longer than all that is said to the machine otherwise."""
    program = """
import sys
from cudadent42.commands import elsewhere
from cudadent42.plan import Choices, RunOptions
from cudadent42.remote.core.address import parse
from cudadent42.remote.core.consent import NOBODY
from cudadent42.remote.core.hosts import Remote
from cudadent42.remote.core.run import workspace_of
from cudadent42.remote.flows.pipeline import RemoteOptions, arguments_of, terms_of
from cudadent42.remote.providers.ssh import Own

options = RemoteOptions(on="there", run=RunOptions(choices=Choices(suite="small"), device="cpu"))
arguments_of(options)
terms_of(Own(workspace_of(Remote("there", parse("ssh://there"))), ()), options, NOBODY, print)
print(sorted({"torch", "scipy", "sqlalchemy"} & sys.modules.keys()))
"""
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, cwd=SOURCE.parent, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_benchmarks_record_no_cuda_graph_of_their_own() -> None:
    """They take the lab's timers, or `cudadent42.timing.cuda_timers.capture`."""
    scripts = sorted((SOURCE.parent / "benchmarks").rglob("*.py"))
    assert scripts
    assert [path.name for path in scripts if "CUDAGraph(" in path.read_text(encoding="utf-8")] == []
