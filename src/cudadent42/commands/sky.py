"""``run --on sky://FILE``: on a fresh machine that SkyPilot finds."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from cudadent42.commands.common import say
from cudadent42.commands.elsewhere import Asked, check, conclude, folder_of

if TYPE_CHECKING:
    from cudadent42.remote.providers.sky.spec import Spec

_SCHEME = "sky://"


def is_sky(on: str) -> bool:
    return on.startswith(_SCHEME)


def run_in_sky(asked: Asked) -> NoReturn:
    """``run --on sky://FILE``. All that needs no GPU is checked first."""
    from cudadent42.remote.core.checks import check_kernels
    from cudadent42.remote.core.terminal import showing
    from cudadent42.remote.providers.sky.cluster import find_sky
    from cudadent42.remote.providers.sky.run import kept_start, run_on_sky
    from cudadent42.remote.providers.sky.spec import load

    spec = load(Path(asked.on.removeprefix(_SCHEME)))
    arguments = check(asked)
    find_sky()
    if asked.run.device != "cpu":
        check_kernels(asked.run.choices, spec.architectures, say)
    kept = kept_start(spec)
    spec = _within(spec, asked, starting=kept is None)
    target = folder_of(asked)
    ended = run_on_sky(spec, asked.run.device, arguments, target, say, showing(sys.stderr), kept)
    conclude(asked, ended.returned, ended.trouble)


def _within(spec: Spec, asked: Asked, starting: bool) -> Spec:
    """The machine with the longest time that is left for what was agreed on. Raises UsageError where nobody agrees."""
    from cudadent42.commands.machines import agreed_usd
    from cudadent42.cost import rates
    from cudadent42.plan import make_plan
    from cudadent42.registry import registry
    from cudadent42.remote.core import money

    table = rates.load()
    has_gpu = "accelerators" in spec.resources or "instance_type" in spec.resources
    on = "cuda:0" if has_gpu and asked.run.device != "cpu" else "cpu"
    estimate = money.estimate(
        make_plan(asked.run.choices, on, registry),
        table.get(spec.rate),
        table,
        starting=starting,
        own_environment=True,
        idle_minutes=spec.idle_minutes,
    )
    usd = agreed_usd(spec.cluster, estimate, asked.max_cost, asked.yes, asked.as_json)
    minutes = None if usd is None else money.run_minutes(usd, estimate)
    if minutes is None:
        return spec
    say(f"{spec.cluster}: the run is ended {min(minutes, spec.max_minutes)} min after it has arrived there")
    return replace(spec, max_minutes=min(minutes, spec.max_minutes))
