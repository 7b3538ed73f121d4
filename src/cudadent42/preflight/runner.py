"""Running the checks."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from cudadent42.model.records import Check, MachineReport
from cudadent42.preflight.definitions import Context, Fact
from cudadent42.preflight.gpu_probe import Pending
from cudadent42.preflight.host import cpu_model
from cudadent42.preflight.python import import_torch
from cudadent42.preflight.table import DEFINITIONS


def gather(device: str, output: Path) -> Context:
    """What the probes share. The driver is asked while torch, the slowest import, is loaded."""
    pending = Pending()
    with suppress(ImportError, OSError):  # the torch check reports it
        import_torch()
    return Context(device=device, output=output, gpu=pending.result())


def inspect(context: Context) -> MachineReport:
    """Run every check."""
    checks: list[Check] = []
    facts: dict[str, Fact] = {}
    for definition in DEFINITIONS:
        finding = definition.probe(context)
        checks.append(definition.check(finding))
        facts.update(finding.facts)
    return MachineReport(checks=tuple(checks), summary=_summary(context, facts), facts=facts)


def chosen_device(context: Context) -> str:
    """``cpu`` or ``cuda:N``: what ``auto`` means on this machine."""
    return f"cuda:{context.gpu_index}" if context.wants_gpu else "cpu"


def _summary(context: Context, facts: dict[str, Fact]) -> str:
    """``torch=2.7.1+cu128 cuda=12.8 dev=NVIDIA L4``."""
    device = facts.get("gpu_name") or (cpu_model() if not context.wants_gpu else "none")
    return f"torch={facts.get('torch') or 'none'} cuda={facts.get('torch_cuda') or 'none'} dev={device}"
