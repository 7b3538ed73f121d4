"""``run --on sky://FILE``: on a fresh machine that SkyPilot finds."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from cudadent42.commands.common import say
from cudadent42.commands.remote import conclude, new_folder

if TYPE_CHECKING:
    from cudadent42.plan import Choices
    from cudadent42.remote.sky.spec import Spec

_SCHEME = "sky://"


def is_sky(on: str) -> bool:
    return on.startswith(_SCHEME)


def run_in_sky(
    on: str,
    choices: Choices,
    device: str,
    output: Path | None,
    gate: str | None,
    flags: tuple[str, ...],
    as_json: bool,
    max_cost: float | None,
    yes: bool,
) -> NoReturn:
    """``run --on sky://FILE``; the arguments are those of ``run_there``. All that needs no GPU is checked first."""
    from cudadent42 import gates
    from cudadent42.remote.arguments import forwarded
    from cudadent42.remote.checks import check_kernels, check_plan
    from cudadent42.remote.sky.run import find_sky, run_on_sky
    from cudadent42.remote.sky.spec import load
    from cudadent42.remote.terminal import showing
    from cudadent42.remote.tree import project_root
    from cudadent42.runs import check_output

    spec = load(Path(on.removeprefix(_SCHEME)))
    wanted = gates.load(gate) if gate else None
    check_plan(choices)
    arguments = (*forwarded(choices, project_root(), Path.cwd()), f"--device={device}", *flags)
    if output is not None:
        check_output(output)
    find_sky()
    if device != "cpu":
        check_kernels(spec.architectures, say)
    spec = _within(spec, choices, device, max_cost, yes, as_json)
    target = output or new_folder(choices)
    conclude(run_on_sky(spec, device, arguments, target, say, showing(sys.stderr)), wanted, as_json)


def _within(
    spec: Spec, choices: Choices, device: str, max_cost: float | None, yes: bool, as_json: bool
) -> Spec:
    """The machine with the longest time that is left for what was agreed on. Raises UsageError where nobody agrees."""
    from cudadent42.commands.machines import agreed_usd
    from cudadent42.cost import rates
    from cudadent42.plan import make_plan
    from cudadent42.registry import registry
    from cudadent42.remote import money
    from cudadent42.remote.sky.run import open_start

    table = rates.load()
    has_gpu = "accelerators" in spec.resources or "instance_type" in spec.resources
    plan = make_plan(choices, "cuda:0" if has_gpu and device != "cpu" else "cpu", registry)
    found = money.estimate(
        plan,
        table.get(spec.rate),
        table,
        starting=open_start(spec.machine) is None,
        own_environment=True,
        idle_minutes=spec.idle_minutes,
    )
    usd = agreed_usd(spec.cluster, found, max_cost, yes, as_json)
    minutes = None if usd is None else money.run_minutes(usd, found)
    if minutes is None:
        return spec
    say(f"{spec.cluster}: the run is ended {min(minutes, spec.max_minutes)} min after it has arrived there")
    return replace(spec, max_minutes=min(minutes, spec.max_minutes))
