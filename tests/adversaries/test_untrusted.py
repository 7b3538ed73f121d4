"""What ``--untrusted`` keeps from candidates, each of which attacks; and honest ones, which must not notice it."""

from __future__ import annotations

import ast
import ctypes
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import audits
import lab
import pytest

import cudadent42
from cudadent42.audit.stage import audit
from cudadent42.base.errors import MachineNotReadyError
from cudadent42.base.observer import Quiet
from cudadent42.flows import pipeline, sandboxing
from cudadent42.model.integrity import Breach
from cudadent42.model.records import TimerKind
from cudadent42.model.sandbox import Layer
from cudadent42.plan import Choices, RunOptions
from cudadent42.runs.run_folder import load_run
from cudadent42.sandbox.launch import Sandbox
from cudadent42.sandbox.policy import Limits
from cudadent42.scaffold import Kind, create
from cudadent42.stages.build import build
from flashmoe_science.jit.cache import cache_directory
from warm_python import FreshPopen

HOSTILE = lab.FOLDER / "hostile"
HONEST = lab.FOLDER / "honest" / "ordinary.py"
ATTACKS = (
    "reads_secrets",
    "opens_sockets",
    "writes_outside",
    "edits_results",
    "poisons_cache",
    "disturbs_others",
    "breaks_out",
)
SECRET = "a secret of the test"
MIB = 1 << 20
SMALL = Limits(
    memory_bytes=1 << 30,
    address_bytes=64 << 30,
    processes=100,
    file_bytes=64 * MIB,
    open_files=512,
    scratch_bytes=128 * MIB,
)


@pytest.fixture(autouse=True, scope="module")
def _surroundings() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("SECRET_TOKEN_OF_THE_TEST", SECRET)
        patch.setattr(sandboxing, "limits_for", lambda device: SMALL)
        yield


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the hostile candidates, and beside it all that they attack."""
    folder = tmp_path_factory.mktemp("untrusted")
    candidates, home, run = folder / "candidates", folder / "home", folder / "run"
    shutil.copytree(HOSTILE, candidates)
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "id_ed25519").write_text(SECRET)
    run.mkdir()
    for name in ("results.json", "samples.csv", "manifest.json"):
        (run / name).write_text("measured")
    (home / "victim").write_text("as it was")
    entry = cache_directory() / f"test-{uuid.uuid4().hex}"
    entry.write_text("compiled")
    own = ctypes.create_string_buffer(b"a seed that only the parent has")
    with ExitStack() as stack:
        stack.callback(entry.unlink)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
        named = stack.enter_context(socket.socket(socket.AF_UNIX))
        named.bind(str(folder / "s"))
        named.listen(64)
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        word = f"cudadent42-{uuid.uuid4().hex}"
        abstract.bind("\0" + word)
        abstract.listen(64)
        targets = {
            "home": str(home),
            "key": str(home / ".ssh" / "id_ed25519"),
            "run": str(run),
            "victim": str(home / "victim"),
            "lab": cudadent42.__file__,
            "entry": str(entry),
            "parent": os.getpid(),
            "address": ctypes.addressof(own),
            "port": tcp.getsockname()[1],
            "socket": str(folder / "s"),
            "abstract": word,
        }
        (candidates / "targets.json").write_text(json.dumps(targets))
        yield folder


@pytest.fixture(scope="module")
def sandbox(scene: Path) -> Iterator[Sandbox]:
    try:
        with sandboxing.untrusted("cpu", [scene / "candidates" / "bombs.py", HONEST]) as made:
            yield made
    except MachineNotReadyError as error:
        pytest.skip(f"no sandbox on this machine: {error}")


def candidate(scene: Path, file: str, function: str = "attention") -> str:
    return lab.candidate(scene / "candidates" / f"{file}.py", function)


def attempts(text: str) -> dict[str, str]:
    """By name, what came of each."""
    return dict(re.findall(r"attempt (.+?): (.+)", text))


@pytest.fixture(scope="module")
def attacked(scene: Path, sandbox: Sandbox) -> tuple[lab.Seen, dict[str, str]]:
    log = scene / "attacked.log"
    names = [candidate(scene, name) for name in ATTACKS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", FreshPopen)  # what they attack is a process as users have it
        return lab.put_before(names, log, sandbox=sandbox), attempts(log.read_text())


def test_every_attack_is_refused(attacked: tuple[lab.Seen, dict[str, str]]) -> None:
    _, outcomes = attacked
    assert len(outcomes) >= 45
    assert {name: outcome for name, outcome in outcomes.items() if not outcome.startswith("refused")} == {}


def test_ways_out_are_refused_and_do_not_merely_fail(attacked: tuple[lab.Seen, dict[str, str]]) -> None:
    _, outcomes = attacked
    for name in (
        "a user namespace",
        "mount",
        "unmount",
        "chroot",
        "io_uring",
        "bpf",
        "keyctl",
        "open by handle",
    ):
        assert "PermissionError" in outcomes[name], name


def test_nothing_outside_has_changed(attacked: tuple[lab.Seen, dict[str, str]], scene: Path) -> None:
    targets = json.loads((scene / "candidates" / "targets.json").read_text())
    victim = Path(targets["victim"])
    assert victim.read_text() == "as it was"
    assert victim.stat().st_mtime > 1
    assert victim.stat().st_mode & 0o777 != 0o777
    assert sorted(os.listdir(victim.parent)) == [".ssh", "victim"]
    assert {path.read_text() for path in Path(targets["run"]).iterdir()} == {"measured"}
    assert Path(targets["entry"]).read_text() == "compiled"
    for name in ("attempts.py", "writes_outside.py"):
        assert (scene / "candidates" / name).read_bytes() == (HOSTILE / name).read_bytes()


def test_the_run_ends_with_its_evidence(attacked: tuple[lab.Seen, dict[str, str]], scene: Path) -> None:
    seen, _ = attacked
    for name in ATTACKS:
        own = candidate(scene, name)
        assert [case for case in seen.verified.cases if case.implementation == own], name
        assert not seen.failures(own)
    assert len({sample.block for sample in seen.benched.samples}) == lab.BLOCKS


def test_the_attempts_are_real(scene: Path) -> None:
    """Outside of a sandbox those succeed that do no harm."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import attempts; "
        "attempts.reads_secrets(); attempts.opens_sockets()"
    )
    command = [sys.executable, "-c", program, str(scene / "candidates")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    outcomes = attempts(done.stdout)
    for name in (
        "read a key of the home",
        "list the home",
        "read a secret variable",
        "read the run folder",
        "connect on loopback",
        "connect to a socket file",
        "connect to an abstract socket",
        "listen",
    ):
        assert outcomes[name].startswith("done"), (name, outcomes[name])
    assert SECRET in outcomes["read a key of the home"]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("forks", r"(\d+) processes, then BlockingIOError"),
        ("fills_memory", r"(\d+) MiB, then no more"),
        ("fills_shared_memory", r"OSError\(12"),
        ("fills_disk", r"(\d+) MiB, then OSError\(28"),
        ("one_long_file", r"OSError\(27"),
    ],
)
def test_a_bomb_is_bounded(function: str, says: str, scene: Path, sandbox: Sandbox) -> None:
    log = scene / f"{function}.log"
    name = candidate(scene, "bombs", function)
    if function == "fills_disk" and not sandbox.report.has(Layer.TREE):
        pytest.skip("the scratch folder has no file system of its own here, so its size has no bound")
    seen = lab.put_before([name], log, sandbox=sandbox)
    evidence = log.read_text()
    match = re.search(f"bomb: {says}", evidence)
    ended = seen.evidence(name) + "; ".join(seen.benched.skipped.values())
    if match is None:  # or the system ended it all, which is recorded
        assert "bomb" not in evidence, evidence
        assert "worker died: signal 9" in ended, ended
    assert "no end" not in evidence
    assert [case for case in seen.verified.cases if case.implementation == "pytorch"]


def test_a_daemon_does_not_outlive_the_run(scene: Path, sandbox: Sandbox) -> None:
    lab.put_before([candidate(scene, "leaves_a_daemon")], scene / "daemon.log", sandbox=sandbox)
    words = b"a daemon of the test of untrusted candidates"
    lines = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            lines.append(Path("/proc", process, "cmdline").read_bytes())
        except OSError:  # it ended
            continue
    assert not [line for line in lines if line.startswith(words)]


@pytest.mark.usefixtures("fresh_processes")
@pytest.mark.parametrize("sealed", [True])
def test_the_audit_confines_each_contestant(sealed: bool, scene: Path, sandbox: Sandbox) -> None:
    log = scene / "audit.log"
    name = candidate(scene, "disturbs_others")
    plan = lab.plan_for([name], TimerKind.CPU)
    results = audits.claim([name], 0.2, 0.15)
    audited = audit(plan, results, log=log, measured_s=1.0, sealed=sealed, sandbox=sandbox)
    outcomes = attempts(log.read_text())
    assert len(outcomes) == 4
    assert all(outcome.startswith("refused") for outcome in outcomes.values()), outcomes
    assert not audited.why_not
    assert Breach.AUDIT_DIED not in {finding.breach for finding in audited.findings}
    assert [each.implementation for each in audited.confirmations] == [name]


HONEST_FUNCTIONS = [
    node.name
    for node in ast.parse(HONEST.read_text()).body
    if isinstance(node, ast.FunctionDef) and [each.arg for each in node.args.kwonlyargs]
]


@pytest.fixture(scope="module")
def honest(scene: Path, sandbox: Sandbox) -> lab.Seen:
    names = [lab.candidate(HONEST, name) for name in HONEST_FUNCTIONS]
    at_import = sorted((lab.FOLDER / "honest").glob("*_at_import.py"))
    return lab.put_before([*names, *map(lab.candidate, at_import)], scene / "honest.log", sandbox=sandbox)


def test_honest_candidates_do_not_notice(honest: lab.Seen) -> None:
    assert len(honest.plan.implementations) >= 25
    for name in honest.plan.implementations:
        assert not honest.breaches(name), honest.evidence(name)
        assert not honest.failures(name), honest.failures(name)
    assert honest.benched.skipped == {}


def test_a_run_says_what_its_candidates_were_confined_by(scene: Path, sandbox: Sandbox) -> None:
    suite = scene / "untrusted.toml"
    suite.write_text(
        'name = "untrusted"\ndtypes = ["fp32"]\nrepeats = 6\nwarmup = 1\n'
        "case = [{ name = 'small', batch = 1, num_heads = 2, seqlen = 64, head_dim = 32 }]\n"
    )
    options = RunOptions(
        choices=Choices(
            suite=str(suite), implementations=(lab.candidate(HONEST, "plain"),), timer=TimerKind.CPU
        ),
        device="cpu",
        ignore_preflight=True,
        output=scene / "whole",
        untrusted=True,
    )
    outcome = pipeline.run(options, Quiet(), lambda opened: None)
    kept = load_run(outcome.folder).manifest.sandbox
    assert kept is not None
    assert [state.layer for state in kept.layers] == [state.layer for state in sandbox.report.layers]
    assert kept.accepted_missing == ()
    page = (outcome.folder / "report.md").read_text()
    assert kept.summary in page
    assert outcome.verify.passed


@pytest.mark.usefixtures("sandbox")
def test_kernels_of_files_are_compiled_in_the_sandbox(scene: Path) -> None:
    """What is compiled there stays there: the user's cache gets nothing."""
    create("mine", Kind.CPU, scene)
    with (scene / "mine" / "mine.cpp").open("a") as source:
        source.write(f"// {uuid.uuid4()}\n")  # so that no cache has it
    with sandboxing.untrusted("cpu", [scene / "mine" / "mine.toml"]) as made:
        built = build("cpu", (), lambda *_: None, [lab.CASE], [str(scene / "mine" / "mine.toml")], made)
        assert built.passed, built.failures
        assert built.kernels
        assert not any(kernel.cached for kernel in built.kernels)
        name = str(scene / "mine" / "mine.toml")
        assert not lab.put_before([name], scene / "mine.log", sandbox=made).failures(name)
    kept = os.listdir(cache_directory())
    assert not [name for name in kept for kernel in built.kernels if name.startswith(kernel.key)]


@pytest.mark.usefixtures("sandbox")
def test_a_source_that_leads_out_of_its_folder_is_not_compiled(scene: Path) -> None:
    """Its text would be in the compiler's words."""
    create("leads_out", Kind.CPU, scene)
    source = scene / "leads_out" / "leads_out.cpp"
    source.unlink()
    secret = scene / "home" / ".ssh" / "key.cpp"
    secret.write_text(SECRET)
    source.symlink_to(secret)
    with sandboxing.untrusted("cpu", [scene / "leads_out" / "leads_out.toml"]) as made:
        built = build("cpu", (), lambda *_: None, [lab.CASE], [str(source.with_suffix(".toml"))], made)
    assert not built.passed
    assert SECRET.split()[1] not in "".join(failure.log + failure.message for failure in built.failures)


def test_a_sandbox_that_is_not_as_it_was_runs_nothing(scene: Path, sandbox: Sandbox) -> None:
    """A layer that is wanted and not there: here one that no machine has."""
    policy = replace(sandbox.policy, wanted=(*(sandbox.policy.wanted or ()), "a layer of tomorrow"))
    lost = replace(sandbox, policy=policy)
    with pytest.raises(MachineNotReadyError, match="the sandbox lacks a layer of tomorrow"):
        lab.put_before([lab.candidate(HONEST, "plain")], scene / "lost.log", sandbox=lost)
