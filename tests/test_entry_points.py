"""Shell, make, workflows and the rules for coding agents name what exists, and all go through the same preflight."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import made_command_line

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
RELEASE = ROOT / ".github/workflows/release.yml"
NIGHTLY = ROOT / ".github/workflows/nightly.yml"
MEASURING_WORKFLOWS = [path for path in WORKFLOWS if path not in (RELEASE, NIGHTLY)]
SCRIPTS = (
    "run.sh",
    "test.sh",
    "tools/bootstrap.sh",
    "tools/preflight.sh",
    "tools/build.sh",
    "tools/release.py",
    "tools/sanitize.sh",
    ".ci/run",
)
PROGRAMS = {RELEASE.name: ("gh",), NIGHTLY.name: ("sudo", ".venv/bin/python")}
"""What a workflow runs that is not of this repository."""
POINTERS = {
    "CLAUDE.md": "@AGENTS.md",
    "GEMINI.md": "@AGENTS.md",
    ".github/copilot-instructions.md": "AGENTS.md",
}
MEASURING = (
    ("run", "--suite", "small"),
    ("bench", "--suite", "small"),
    ("verify", "--suite", "small"),
    ("compare", "HEAD", "."),
    ("profile", "tiny", "--suite", "small"),
)
"""The commands that put work on the machine whose figures are wanted."""


def commands(group: Any) -> dict[str, Any]:
    """By name; none of a command that is no group."""
    return dict(getattr(group, "commands", {}))


CLI = commands(made_command_line.group())


def shell_lines(text: str) -> list[list[str]]:
    """The words of each command of a shell text."""
    lines = [line.partition(" #")[0].strip() for line in text.splitlines()]
    parts = [part for line in lines for part in re.split(r";|\|\||&&", line) if part.strip()]
    return [shlex.split(part.replace("[", "").replace("]", "")) for part in parts]


def steps(workflow: Path) -> list[dict[str, Any]]:
    document = yaml.safe_load(workflow.read_text())
    return [step for job in document["jobs"].values() for step in job["steps"]]


def code_blocks(page: Path) -> str:
    return "\n".join(re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL))


def sources() -> Iterator[tuple[str, list[list[str]]]]:
    for workflow in WORKFLOWS:
        yield workflow.name, [words for step in steps(workflow) for words in shell_lines(step.get("run", ""))]
    yield "AGENTS.md", shell_lines(code_blocks(ROOT / "AGENTS.md"))
    recipes = [line.strip() for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("\t")]
    yield "Makefile", shell_lines("\n".join(recipes).replace("$(ARGS)", ""))


@pytest.mark.parametrize(("name", "lines"), list(sources()), ids=[name for name, _ in sources()])
def test_every_command_that_is_named_exists(name: str, lines: list[list[str]]) -> None:
    assert lines
    for program, *words in lines:
        if program in PROGRAMS.get(name, ()):
            continue
        if not program.endswith("cudadent42"):
            assert program.removeprefix("./") in SCRIPTS, f"{name}: {program}"
            assert os.access(ROOT / program, os.X_OK)
            continue
        command, *rest = words
        assert command in CLI, f"{name}: {command}"
        inner = commands(CLI[command])
        assert not inner or rest[0] in inner or rest[0].startswith("--"), f"{name}: {command} {rest}"
        options = {
            option for each in (CLI[command], *inner.values()) for p in each.params for option in p.opts
        }
        assert {word for word in rest if word.startswith("--")} <= options, f"{name}: {command} {rest}"


@pytest.mark.parametrize("workflow", MEASURING_WORKFLOWS, ids=lambda path: path.name)
def test_workflows_begin_with_preflight_and_keep_the_run(workflow: Path) -> None:
    told = steps(workflow)
    first = next(step["run"] for step in told if "run" in step)
    assert first.startswith("tools/bootstrap.sh ")  # ends in preflight
    (run,) = (step["run"] for step in told if step.get("run", "").startswith("./run.sh"))
    assert "--ignore-preflight" not in run
    assert "--output-dir run" in run
    assert any("upload-artifact" in step.get("uses", "") and step["if"] == "always()" for step in told)


def test_a_workflow_puts_nobodys_text_into_a_shell() -> None:
    for workflow in WORKFLOWS:
        assert not [step for step in steps(workflow) if "${{" in step.get("run", "")]


def test_what_is_released_and_each_night_is_compiled_anew() -> None:
    kept = {
        path.name
        for path in WORKFLOWS
        if any("actions/cache" in step.get("uses", "") for step in steps(path))
    }
    assert kept == {"ci.yml"}
    [cache] = [
        step["with"]
        for step in steps(WORKFLOWS[0].with_name("ci.yml"))
        if "actions/cache" in step.get("uses", "")
    ]
    for sources in ("kernels/", "configs/", "emulation/", "requirements/"):
        assert sources in cache["key"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_what_was_looked_at_and_may_only_read(workflow: Path) -> None:
    """A tag can be moved to another commit; a token that may write is one that can be stolen."""
    lines = workflow.read_text().splitlines()
    uses = [line.split("uses:")[1].strip() for line in lines if "uses:" in line]
    assert len(uses) == len([step for step in steps(workflow) if "uses" in step])
    assert [use for use in uses if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", use)] == []
    document = yaml.safe_load(workflow.read_text())
    assert document["permissions"] == {"contents": "read"}
    if workflow != RELEASE:
        assert not [job for job in document["jobs"].values() if "permissions" in job]
    checkouts = [step for step in steps(workflow) if step.get("uses", "").startswith("actions/checkout@")]
    assert {step["with"]["persist-credentials"] for step in checkouts} == {False}


def test_a_release_is_published_by_jobs_that_run_no_code_of_the_repository() -> None:
    """Each may do one thing more than read, and neither checks anything out; all begins with the tests."""
    document = yaml.safe_load(RELEASE.read_text())
    assert document[True] == {"push": {"tags": ["v*"]}}  # "on" is YAML 1.1's word for true
    jobs = document["jobs"]
    assert [(name, job.get("needs")) for name, job in jobs.items()] == [
        ("test", None),
        ("build", "test"),
        ("publish", "build"),
        ("page", "publish"),
    ]
    may = {name: job["permissions"] for name, job in jobs.items() if "permissions" in job}
    assert may == {"publish": {"id-token": "write"}, "page": {"contents": "write"}}
    for name in may:
        uses = [step["uses"].split("@")[0] for step in jobs[name]["steps"] if "uses" in step]
        assert "actions/checkout" not in uses
    assert not [step for step in jobs["publish"]["steps"] if "run" in step]
    assert jobs["publish"]["environment"] == "pypi"


def test_a_release_publishes_the_files_that_were_built() -> None:
    jobs = yaml.safe_load(RELEASE.read_text())["jobs"]
    kept = {
        step["with"]["name"] for step in jobs["build"]["steps"] if "upload-artifact" in step.get("uses", "")
    }
    assert kept == {"dist", "notes"}
    (taken,) = (step for step in jobs["publish"]["steps"] if "download-artifact" in step.get("uses", ""))
    assert taken["with"] == {"name": "dist", "path": "dist"}
    (release,) = (step["run"] for step in jobs["page"]["steps"] if "run" in step)
    assert "dist/*" in release
    assert "--notes-file notes/notes.md" in release


def test_each_night_does_what_hardening_promises() -> None:
    """All of its parts with their counts, by programs that are there and know these options."""
    lines = [words for step in steps(NIGHTLY) for words in shell_lines(step.get("run", ""))]
    programs = [words[1:] for words in lines if words[0] == ".venv/bin/python"]
    for script, *words in programs:
        text = (ROOT / script).read_text()
        for option in (word for word in words if word.startswith("--")):
            assert f'"{option}"' in text, f"{script} {option}"
    harden, kills = (
        " ".join(next(words for words in programs if words[0] == script))
        for script in ("tools/harden.py", "benchmarks/session_kill.py")
    )
    assert "--calls 10000 --entries 10000" in harden
    assert "--kills 100 " in kills
    kinds = [words[1] for words in programs if words[0] == "tests/hard/fuzz.py"]
    assert kinds == ["options", "files", "folders"]
    counts = runpy.run_path(str(ROOT / "tests/hard/fuzz.py"))["COUNTS"]
    assert counts == {"options": 2000, "files": 2000, "folders": 1000}
    attack = "tests/flashmoe_science/jit/test_cache_attack.py"
    assert any(words[0] == "sudo" and attack in words and "--slow" in words for words in lines)
    assert ["tools/sanitize.sh"] in lines


def test_ci_runs_what_lesser_processors_run() -> None:
    """So that neither AVX2 nor the portable code surprises a user of one."""
    text = (ROOT / ".ci/run").read_text()
    assert 'if each.value in ("avx2", "portable")' in text
    assert re.search(r"FLASHMOE_CPU_ISA=\$isa \./test\.sh [^\n]*tests/flashmoe_science/cpu", text)


def test_pins_do_not_grow_old() -> None:
    updates = yaml.safe_load((ROOT / ".github/dependabot.yml").read_text())["updates"]
    assert {update["package-ecosystem"] for update in updates} == {"github-actions", "pip"}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_no_exit_code_is_taken_for_a_pass(workflow: Path) -> None:
    """Least of all 6, of a gate that could not be decided."""
    document = yaml.safe_load(workflow.read_text())
    assert not [job for job in document["jobs"].values() if job.get("continue-on-error")]
    for step in steps(workflow):
        assert not step.get("continue-on-error")
        assert not re.search(r"[|;]|set \+e", step.get("run", "")), step["run"]


def test_the_gpu_workflow_runs_no_code_of_a_fork() -> None:
    document = yaml.safe_load((ROOT / ".github/workflows/gpu.yml").read_text())
    job = document["jobs"]["gpu"]
    assert "head.repo.full_name == github.repository" in job["if"]
    assert job["runs-on"] == ["self-hosted", "gpu"]
    assert set(document[True]) == {"workflow_dispatch", "pull_request"}  # "on" is YAML 1.1's word for true
    assert document[True]["pull_request"] == {"types": ["labeled"]}


@pytest.mark.parametrize("target", ["bootstrap", "preflight", "run", "test", "check"])
def test_make_targets_pass_their_arguments_on(target: str) -> None:
    done = subprocess.run(
        ["make", "--dry-run", target, "ARGS=--suite small"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    program, *words = done.stdout.split()
    assert program.removeprefix("./") in SCRIPTS
    assert words == ([] if target == "check" else ["--suite", "small"])


@pytest.mark.parametrize(("name", "text"), POINTERS.items(), ids=POINTERS)
def test_rules_for_coding_agents_are_in_one_place(name: str, text: str) -> None:
    (line,) = (ROOT / name).read_text().splitlines()
    assert text in line


def test_the_rules_put_preflight_first() -> None:
    rules = (ROOT / "AGENTS.md").read_text()
    assert "tools/bootstrap.sh" in shell_lines(code_blocks(ROOT / "AGENTS.md"))[0]
    assert "Preflight OK" in rules
    assert re.search(r"Run preflight before anything that costs machine time", rules)


@pytest.mark.parametrize("arguments", MEASURING, ids=lambda words: words[0])
def test_nothing_is_measured_on_a_machine_that_fails_preflight(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cudadent42", *arguments, "--device", "cuda:99"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 4, done.stderr
    assert "fix: " in done.stderr
    assert "--ignore-preflight" in done.stderr  # the word that overrules it
