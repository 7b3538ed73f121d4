"""Run and session folders with some of their files damaged, and the commands that read such folders."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import hostile

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
    kind = chance.choice(("run", "run", "session"))
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
    command = chance.choice(_SESSION if kind == "session" else _RUN)
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
