"""Real run folders, written as a run writes them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

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
from cudadent42.runs import run_folder
from cudadent42.runs.source import Revision

if find_spec("sqlalchemy") is None:  # tests/cudadent42/test_ledger_absent.py has what must work then
    collect_ignore_glob = ["test_*.py"]

sys.path.insert(0, str(Path(__file__).parent))  # for the module that tests here share

CASES = tuple(AttentionCase("tiny", dtype, 2, 4, 2, 32, 48, 64) for dtype in ("fp16", "bf16"))


@pytest.fixture
def make_run() -> Callable[..., Path]:
    return _make_run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where the ledger is."""
    return tmp_path / "state" / "ledger.sqlite"


def _make_run(
    folder: Path,
    *,
    seed: int = 0,
    latencies: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0, 5.0),
    verdicts: tuple[Verdict, Verdict] = (Verdict.FASTER, Verdict.UNDECIDED),
    machine: str = "CPU A",
    revision: str = "0123456789abcdef",
    speedup: float = 2.0,
) -> Path:
    """A finished run of two cases, of which the second stays undecided."""
    plan = Plan("unit", "cpu", CASES, "pytorch", ("pytorch", "cudadent42"), len(latencies), 0, seed)
    report = MachineReport((), f"torch=none dev={machine}", {"cpu_model": machine, "load": 0.5})
    with run_folder.RunWriter(
        folder, plan, report, Revision(revision, "main", False, "", ()), ["cudadent42", "run"]
    ) as run:
        for case in CASES:
            for block, latency in enumerate(latencies):
                for name, factor in (("pytorch", 1.0), ("cudadent42", 0.5)):
                    flags = "throttled" if block == 0 else ""
                    run.append_sample(
                        Sample(case.id, name, block, 0, latency * factor, 1, float("nan"), 0.1, flags)
                    )
        run.write_verify(
            VerifyReport((VerifiedCase(CASES[0].id, "cudadent42", "random", None, None, None, True),))
        )
        rows = tuple(
            Comparison(
                "tiny",
                case.dtype,
                "cudadent42",
                "pytorch",
                speedup,
                0.95 * speedup,
                1.05 * speedup,
                verdict,
                1.5,
                3.0,
                5,
                1,
            )
            for case, verdict in zip(CASES, verdicts, strict=True)
        )
        control = Comparison(
            "tiny", "fp16", "pytorch_control", "pytorch", 1.0, 0.9, 1.1, Verdict.EQUAL, 3.0, 3.0, 5
        )
        run.write_results(
            Results(
                *("pytorch", "cudadent42", 2.0, 1.9, 2.1, Verdict.FASTER, 0.01, float("nan"), rows),
                control=(control,),
            )
        )
    return folder
