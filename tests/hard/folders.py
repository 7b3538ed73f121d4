"""Folders of runs, sessions and tunings with some of their files damaged, and the commands that read such folders."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import hostile

from cudadent42.decisions.racing import Rules
from cudadent42.model.records import (
    Comparison,
    MachineReport,
    Plan,
    Results,
    Sample,
    Verdict,
    VerifiedCase,
    VerifyReport,
)
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.runs.run_folder import RunWriter
from cudadent42.runs.source import Revision
from cudadent42.tune import journal
from cudadent42.tune.prune import CompiledArm, Target
from cudadent42.tune.space import DEFAULT

_CASES = tuple(AttentionCase("tiny", dtype, 2, 4, 2, 32, 48, 64) for dtype in ("fp16", "bf16"))
_RUN = (
    ("report", "."),
    ("gate", ".", "--gate", "default"),
    ("gate", ".", "--gate", "improvement"),
    ("patterns", "match", "."),
    ("ledger", "rebuild", "."),
)
_SESSION = (
    ("session", "status", "--session", "."),
    ("session", "report", "--session", "."),
    ("session", "note", "seen", "--session", "."),
    ("session", "unpack", ".", "../unpacked"),
    ("patterns", "match", "."),
    ("ledger", "rebuild", "."),
)


_TUNING = (
    ("tune", "status", "."),
    ("tune", "report", "."),
    ("tune", "install", "."),
    ("tune", "resume", "."),
    ("patterns", "match", "."),
)


def make_tuning(folder: Path) -> None:
    """Of a kernel's two configurations on one case, one of which is confirmed."""
    case = _CASES[0]
    plan = Plan("unit", "cpu", (case,), "k.toml", ("k.toml",), 6, 0, 0)
    setup = journal.Setup(
        schema_version=journal.SCHEMA_VERSION,
        version="0",
        space="space.toml",
        space_digest="0" * 64,
        kernel="attention.portable",
        kernel_digest="1" * 64,
        arms={DEFAULT: "k.toml", "A=1": "a.toml", "A=2": "b.toml"},
        settings={"A=1": {"A": 1}, "A=2": {"A": 2}},
        regions=("seqlen_q",),
        plan=plan,
        rules=Rules(rungs=(6,)),
        target=Target("cpu"),
        device=journal.Device("CPU A"),
    )
    arms, job = ("A=1", "A=2"), f"{case.id}#0.0"
    with journal.TuningJournal(folder, setup) as events:
        events.append(journal.Opened("here"))
        for arm in (DEFAULT, *arms):
            events.append(journal.Compiled(CompiledArm(arm, {case.id: f"code of {arm}"})))
        events.append(journal.JobStarted(job, 1, case.id, arms, 1, "races/j-1"))
        for block in range(6):
            latencies = {DEFAULT: 1.0 + block / 100, "A=1": 0.8 + block / 100, "A=2": 1.5}
            events.append(journal.BlockMeasured(job, 1, block, latencies))
        events.append(journal.JobEnded(job, 1))
        events.append(journal.RungDone(case.id, 1, "A=1", ()))
        events.append(journal.Settled(case.id, "A=1", (), "it leads"))
        events.append(journal.ConfirmationStarted(case.id, "A=1", 1, "confirmed/c-1"))
        events.append(
            journal.Confirmed(
                *(case.id, "A=1", 1, "confirmed/c-1", 1.25, 1.2, 1.3),
                verdict=Verdict.FASTER,
                holds=True,
                reason="",
            )
        )


def make_run(folder: Path) -> None:
    """A finished run of two cases."""
    plan = Plan("unit", "cpu", _CASES, "pytorch", ("pytorch", "cudadent42"), 5, 0, 0)
    machine = MachineReport((), "torch=none dev=CPU A", {"cpu_model": "CPU A", "load": 0.5})
    revision = Revision("0123456789abcdef", "main", False, "", ())
    with RunWriter(folder, plan, machine, revision, ["cudadent42", "run"]) as run:
        for case in _CASES:
            for block in range(5):
                for name, factor in (("pytorch", 1.0), ("cudadent42", 0.5)):
                    run.append_sample(
                        Sample(case.id, name, block, 0, (1.0 + block) * factor, 1, 1.0, 0.1, "")
                    )
        run.write_verify(
            VerifyReport((VerifiedCase(_CASES[0].id, "cudadent42", "random", None, None, None, True),))
        )
        rows = tuple(
            Comparison(
                "tiny", case.dtype, "cudadent42", "pytorch", 2.0, 1.9, 2.1, Verdict.FASTER, 1.5, 3.0, 5
            )
            for case in _CASES
        )
        control = Comparison(
            "tiny", "fp16", "pytorch_control", "pytorch", 1.0, 0.9, 1.1, Verdict.EQUAL, 3.0, 3.0, 5
        )
        run.write_results(
            Results(
                "pytorch", "cudadent42", 2.0, 1.9, 2.1, Verdict.FASTER, 0.01, 0.02, rows, control=(control,)
            )
        )


def damage(chance: random.Random, folder: Path, examples: Path) -> list[str]:
    """A damaged copy of an example in the empty ``folder``; the arguments of a command that reads it."""
    kind = chance.choice(("run", "run", "session", "tuning"))
    shutil.copytree(examples / kind, folder, dirs_exist_ok=True)
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and path.suffix in (".json", ".jsonl", ".csv", ".toml", ".bundle", ".diff")
    )
    for path in chance.sample(files, min(len(files), chance.choice((1, 1, 1, 2, 4)))):
        how = chance.random()
        if how < 0.1:
            hostile.in_the_way(path, chance)
        elif how < 0.4:
            path.write_bytes(hostile.damage_bytes(path.read_bytes(), chance))
        elif path.suffix == ".json":
            path.write_bytes(hostile.damage_json(path.read_bytes(), chance))
        elif path.suffix == ".jsonl":
            path.write_bytes(_lines(path.read_bytes(), chance))
        elif path.suffix == ".csv":
            path.write_bytes(_cells(path.read_bytes(), chance))
        else:
            path.write_bytes(hostile.damage_bytes(path.read_bytes(), chance))
    command = chance.choice({"run": _RUN, "session": _SESSION, "tuning": _TUNING}[kind])
    return [*command, *(["--json"] if chance.random() < 0.3 else [])]


def _lines(content: bytes, chance: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    if not lines:
        return b"{}\n"
    number = chance.randrange(len(lines))
    lines[number] = hostile.damage_json(lines[number], chance) + b"\n"
    return b"".join(lines)


def _cells(content: bytes, chance: random.Random) -> bytes:
    lines = content.decode().splitlines()
    for _ in range(chance.randrange(1, 4)):
        number = chance.randrange(len(lines))
        cells = lines[number].split(",")
        cells[chance.randrange(len(cells))] = hostile.text(chance)
        lines[number] = ",".join(cells)
    return ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")
