"""Whole races of small kernels, on the real stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import repositories as r

from cudadent42.base.errors import BuildFailedError, ExitCode, UsageError
from cudadent42.flows.race import Outcome, RaceOptions, race
from cudadent42.plan import Choices, RunOptions
from cudadent42.runs.run_folder import load_run
from cudadent42.scaffold import Kind, create
from cudadent42.stages import gates
from flashmoe_science.jit.host import InstructionSet


class Listener:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def stage(self, name: str) -> None:
        assert name

    def advance(self, fraction: float, what: str) -> None:
        assert 0.0 <= fraction <= 1.0001

    def note(self, text: str) -> None:
        self.notes.append(text)

    def detail(self, text: str) -> None:
        self.notes.append(text)


def raced(tmp_path: Path, parent: str, child: str, root: Path | None = None, entry: str = r.ENTRY) -> Outcome:
    (tmp_path / "unit.toml").write_text(r.SUITE)
    options = RaceOptions(
        run=RunOptions(
            choices=Choices(suite=str(tmp_path / "unit.toml"), budget_s=20.0),
            device="cpu",
            output=tmp_path / "run",
            gate=gates.load("default"),
            ignore_preflight=True,
            with_report=False,
        ),
        repository=root,
        entry=entry,
    )
    return race(parent, child, options, Listener())


def test_two_revisions_in_one_run_folder(tmp_path: Path) -> None:
    root = r.repository(tmp_path / "repo")
    r.write_kernel(root, extra="# the same, said otherwise")
    outcome = raced(tmp_path, "HEAD", "WORKTREE", root)
    run = load_run(outcome.folder)
    names = list(run.plan.versions)
    assert names[0].startswith("HEAD@")
    assert names[1].startswith("WORKTREE@")
    assert run.plan.baseline == names[0]
    assert {sample.implementation for sample in run.samples} == {*names, f"{names[0]}_control"}
    assert {sample.inner for sample in run.samples} == {
        run.samples[0].inner
    }  # windows of as many calls on all sides
    assert outcome.results.cases[0].measured_blocks == 8
    assert outcome.verify.passed
    assert outcome.gates is not None
    assert json.loads((outcome.folder / "gates.json").read_text())["exit_code"] == outcome.gates.exit_code


def test_a_version_that_is_wrong_is_not_timed(tmp_path: Path) -> None:
    root = r.repository(tmp_path / "repo")
    r.write_kernel(root, offset="0.25")
    outcome = raced(tmp_path, "HEAD", "WORKTREE", root)
    assert outcome.exit_code is ExitCode.VERIFICATION_FAILED
    assert outcome.results.cases == ()
    assert outcome.gates is not None
    assert outcome.gates.decision is gates.Decision.FAILED


BROKEN = {
    "__init__.py": "from flashmoe_science.attention import flash_attention\n",
    "errors.py": """
class DeviceError(RuntimeError): ...
class BuildError(RuntimeError):
    log = "kernel.cpp:1: error: nonsense"
""",
    "attention.py": "def flash_attention(query, key, value, *, causal=False, softmax_scale=None): ...\n",
    "cpu.py": """
from flashmoe_science.errors import BuildError

def build():
    raise BuildError("the kernel did not compile")
""",
}


def test_a_version_that_does_not_build(tmp_path: Path) -> None:
    tree = r.package(tmp_path / "tree", BROKEN)
    with pytest.raises(BuildFailedError):
        raced(tmp_path, str(tree), str(tree), entry="")
    failures = load_run(tmp_path / "run").build
    assert failures is not None
    assert [failure.message for failure in failures.failures] == ["the kernel did not compile"] * 2
    assert failures.failures[0].log.startswith("kernel.cpp:1")


SOURCES = str(Path(__file__).parents[4] / "src")


def test_a_variant_of_two_versions(tmp_path: Path) -> None:
    """Each version's own kernel of that name, also where its calls would take another."""
    outcome = raced(tmp_path, SOURCES, SOURCES, entry="cudadent42[portable]")
    assert outcome.verify.passed
    assert outcome.results.cases[0].measured_blocks == 8
    run = load_run(outcome.folder)
    assert run.build is not None
    assert {built.recipe.architecture.partition(":")[2] for built in run.build.kernels} == {"portable"}
    quickly = "-O1" in InstructionSet.PORTABLE.flags
    assert all(("-O1" in built.recipe.flags) == quickly for built in run.build.kernels), (
        "compiled anew in each run"
    )
    assert {version.entry for version in run.plan.versions.values()} == {"cudadent42[portable]"}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("cudadent42[portible]", "there is no variant 'portible' (did you mean 'portable'?)"),
        ("cudadent42[portable,blok_m=8]", "the portable kernel has no field 'blok_m'"),
        ("cudadent42[portable,block_m=8]", "runs on cuda, not on cpu"),
    ],
)
def test_a_variant_that_no_version_has(tmp_path: Path, entry: str, words: str) -> None:
    with pytest.raises(BuildFailedError):
        raced(tmp_path, SOURCES, SOURCES, entry=entry)
    build = load_run(tmp_path / "run").build
    assert build is not None
    assert len(build.failures) == 2
    assert words in build.failures[0].message


def test_a_version_whose_kernels_have_no_names_yet(tmp_path: Path) -> None:
    tree = r.package(tmp_path / "tree", BROKEN)
    with pytest.raises(BuildFailedError):
        raced(tmp_path, str(tree), str(tree), entry="cudadent42[portable]")
    build = load_run(tmp_path / "run").build
    assert build is not None
    assert "the kernels of tree cannot be asked for by name" in build.failures[0].message


def cpp_repository(tmp_path: Path) -> tuple[Path, Path]:
    """One commit with the C++ kernel that `new` writes; its source."""
    root = tmp_path / "repo"
    root.mkdir()
    r.git(root, "init", "-q", "-b", "main")
    create("mine", Kind.CPU, root)
    r.commit(root, "A kernel")
    return root, root / "mine" / "mine.cpp"


def test_two_revisions_of_a_kernel_file(tmp_path: Path) -> None:
    root, source = cpp_repository(tmp_path)
    source.write_text(source.read_text() + "\n// the same, said otherwise\n")
    outcome = raced(tmp_path, "HEAD", "WORKTREE", root, entry="mine/mine.toml")
    assert outcome.verify.passed
    assert outcome.results.cases[0].measured_blocks == 8
    run = load_run(outcome.folder)
    assert run.build is not None
    assert [built.recipe.kernel for built in run.build.kernels] == ["mine"] * 2
    labels = [its.label for its in run.manifest.sources.values()]
    assert labels[0] == r.git(root, "rev-parse", "HEAD")[:8]
    assert labels[1].startswith("file ")


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("mine.cpp", "\nnonsense;\n", "nonsense"),
        ("mine.toml", '\nno_such_key = "x"\n', "no_such_key"),
    ],
)
def test_a_kernel_file_that_does_not_build(tmp_path: Path, name: str, damage: str, words: str) -> None:
    root, source = cpp_repository(tmp_path)
    broken = source.with_name(name)
    broken.write_text(broken.read_text() + damage)
    with pytest.raises(BuildFailedError):
        raced(tmp_path, "HEAD", "WORKTREE", root, entry="mine/mine.toml")
    build = load_run(tmp_path / "run").build
    assert build is not None
    (failure,) = build.failures
    assert words in failure.message + failure.log


@pytest.mark.parametrize(
    ("extra", "words"), [("TIMES = = 1", "SyntaxError"), ("import no_such_package", "No module named")]
)
def test_a_python_file_that_cannot_be_imported_does_not_build(tmp_path: Path, extra: str, words: str) -> None:
    """So that a bisection skips it."""
    root = r.repository(tmp_path / "repo")
    r.write_kernel(root, extra=extra)
    with pytest.raises(BuildFailedError):
        raced(tmp_path, "HEAD", "WORKTREE", root)
    build = load_run(tmp_path / "run").build
    assert build is not None
    assert words in build.failures[0].message


def test_entries_that_are_not_there(tmp_path: Path) -> None:
    root, _ = cpp_repository(tmp_path)
    with pytest.raises(UsageError, match=r"no file 'mine/other\.toml'; expected .*kernel\.toml"):
        raced(tmp_path, "HEAD", "WORKTREE", root, entry="mine/other.toml")
