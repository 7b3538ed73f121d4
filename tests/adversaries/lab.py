"""How the tests put a candidate before the lab: the real stages, in a real worker, on one small case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cudadent42.model.events import Event
from cudadent42.model.integrity import Breach, Finding
from cudadent42.model.records import BenchReport, Plan, TimerKind, VerifyReport
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.sandbox.launch import Sandbox
from cudadent42.worker.parent import Worker
from cudadent42.worker.stages import run_stage

FOLDER = Path(__file__).parent
CASE = AttentionCase("small", "fp32", 1, 2, 2, 64, 64, 32)
BLOCKS = 8


@dataclass(frozen=True)
class Seen:
    """What the lab saw of several candidates."""

    verified: VerifyReport
    benched: BenchReport
    plan: Plan

    def breaches(self, name: str) -> set[Breach]:
        findings = (*self.verified.findings, *self.benched.findings)
        return {each.breach for each in findings if name in each.implementation}

    def findings(self) -> list[Finding]:
        return [*self.verified.findings, *self.benched.findings]

    def failures(self, name: str) -> str:
        """What verification said of it, after timing too."""
        cases = (*self.verified.cases, *self.benched.rechecked)
        return "; ".join(each.detail for each in cases if each.implementation == name and not each.passed)

    def evidence(self, name: str) -> str:
        """All that was said of it."""
        lines = [each.line for each in self.findings() if name in each.implementation]
        return "\n".join([*lines, self.failures(name)])


SUITE = """
name = "adversaries"
dtypes = ["fp32"]
repeats = 8
warmup = 1
case = [{ name = "small", batch = 1, num_heads = 2, seqlen = 64, head_dim = 32 }]
"""
"""Of a run: one small case."""


def candidate(path: Path, function: str = "attention") -> str:
    return f"{path}:{function}"


def cheat(name: str) -> str:
    """A file of ``cheats``, as an implementation."""
    return candidate(FOLDER / "cheats" / f"{name}.py")


def plan_for(
    names: Sequence[str],
    timer: TimerKind = TimerKind.CALL,
    repeats: int = BLOCKS,
    baseline: str = "pytorch",
) -> Plan:
    return Plan("adversaries", "cpu", (CASE,), baseline, (baseline, *names), repeats, 1, seed=0, timer=timer)


def put_before(
    names: Sequence[str],
    log: Path,
    timer: TimerKind = TimerKind.CALL,
    sandbox: Sandbox | None = None,
    baseline: str = "pytorch",
) -> Seen:
    """Verify and bench, in one worker."""
    plan = plan_for(names, timer, baseline=baseline)

    def ignore(event: Event) -> None:
        return

    with Worker(log, sandbox=sandbox) as worker:
        verified = run_stage("verify", plan, on_event=ignore, worker=worker)
        benched = run_stage("bench", plan, on_event=ignore, verified=verified, worker=worker)
    return Seen(verified, benched, plan)
