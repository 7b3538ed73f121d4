"""``--fleet``: which engine it names; and ``fleet work``, what such an engine starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cudadent42.base.errors import UsageError
from cudadent42.base.paths import real_path
from cudadent42.commands.help import App
from cudadent42.commands.options import DeviceOption, IgnoreOption

if TYPE_CHECKING:
    from cudadent42.base.observer import Observer
    from cudadent42.fleet.engine import Engine
    from cudadent42.flows.pipeline import Execute
    from cudadent42.plan import RunOptions
    from cudadent42.runs.run_folder import RunWriter

fleet_app = App(
    help="Work for a fleet. --fleet of other commands starts its workers; you can start more by hand."
)


@dataclass(frozen=True)
class _Fleet:
    """A fleet as it is asked for."""

    text: str
    """All of ``--fleet``."""
    rest: str
    """What of it follows the kind and a colon."""
    device: str
    ignore_preflight: bool
    races: bool


_Engines = Callable[[Path], "Engine"]


def _local(fleet: _Fleet) -> _Engines:
    from cudadent42.fleet.local import LocalEngine, slots

    count = _count(fleet.text, fleet.rest) if fleet.rest else None
    where = slots(fleet.device, count, f"--fleet {fleet.text}")
    return lambda root: LocalEngine(root, where, ignore_preflight=fleet.ignore_preflight, races=fleet.races)


def _slurm(fleet: _Fleet) -> _Engines:
    from cudadent42.fleet.slurm import Partition, SlurmEngine

    name, _, count = fleet.rest.partition(":")
    if not name:
        raise UsageError(f"--fleet {fleet.text!r}: expected the name of a partition, as in slurm:gpu:16")
    partition = Partition(name, _count(fleet.text, count) if count else 1, gpus=fleet.device != "cpu")
    return lambda root: SlurmEngine(root, partition, ignore_preflight=fleet.ignore_preflight)


def _ray(fleet: _Fleet) -> _Engines:
    from cudadent42.fleet.ray import RayEngine, imported

    imported()  # before anything is looked at or begun
    return lambda root: RayEngine(
        root, address=fleet.rest, gpus=fleet.device != "cpu", ignore_preflight=fleet.ignore_preflight
    )


def _ssh(fleet: _Fleet) -> _Engines:
    from cudadent42.remote.flows.line import Device
    from cudadent42.remote.flows.workers import SshEngine

    names = [name for name in fleet.rest.split(",") if name]
    if not names or len(set(names)) < len(names):
        raise UsageError(
            f"--fleet {fleet.text!r}: expected names of `remote add`, each once, as in ssh:gpu1,gpu2"
        )
    wanted = Device("cpu" if fleet.device == "cpu" else "cuda", fleet.ignore_preflight)
    return lambda root: SshEngine(root, names, wanted)


_ENGINES: dict[str, Callable[[_Fleet], _Engines]] = {
    "local": _local,
    "slurm": _slurm,
    "ray": _ray,
    "ssh": _ssh,
}


def engines(fleet: str, device: str, *, ignore_preflight: bool, races: bool = False) -> _Engines:
    """What starts the workers that ``--fleet`` names, given the folder of the work. Raises UsageError.

    ``races``: whether what they are to do begins with races, for which they can get ready at once.
    """
    kind, _, rest = fleet.partition(":")
    if kind not in _ENGINES:
        raise _no_engine(fleet)
    return _ENGINES[kind](_Fleet(fleet, rest, device, ignore_preflight, races))


def _no_engine(fleet: str) -> UsageError:
    return UsageError(
        f"--fleet {fleet!r}: expected local[:N], slurm:PARTITION[:N], ray[:ADDRESS] or ssh:NAME[,NAME]"
    )


def spread(fleet: str | None, options: RunOptions) -> Execute:
    """What carries out a run: here, or over the fleet. Raises UsageError."""
    from cudadent42.flows import pipeline

    if fleet is None:
        return pipeline.execute
    if fleet.partition(":")[0] not in _ENGINES:  # before anything is looked at or begun
        raise _no_engine(fleet)
    from cudadent42.fleet.spread import Spread
    from cudadent42.flows.pipeline import Outcome, Prepared

    named = fleet

    def execute(
        prepared: Prepared, run: RunOptions, observer: Observer, opened: Callable[[RunWriter], None]
    ) -> Outcome:
        started = engines(named, prepared.plan.device, ignore_preflight=run.ignore_preflight)
        return Spread(started, options.choices.suite).execute(prepared, run, observer, opened)

    return execute


def _count(fleet: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise UsageError(f"--fleet {fleet!r}: expected a number of workers, 1 or more, in place of {text!r}")
    return int(text)


@fleet_app.command("relay", hidden=True)
def relay(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Say where the workers' files may lie.")],
    device: DeviceOption = "auto",
    ignore_preflight: IgnoreOption = False,
) -> None:
    """Be the far end of --fleet ssh: the workers of this machine, for whoever is at standard input and output."""
    import sys
    from io import FileIO

    from cudadent42.base.parcels import FOLDER_VARIABLE
    from cudadent42.fleet.local import LocalEngine, slots
    from cudadent42.fleet.relay import PARCELS
    from cudadent42.fleet.relay import relay as serve

    where = slots(device, None, f"--device {device}")
    os.environ[FOLDER_VARIABLE] = str(real_path(folder / PARCELS))  # of the workers, and of what they start
    serve(
        LocalEngine(folder, where, ignore_preflight=ignore_preflight),
        folder,
        FileIO(sys.stdin.fileno(), closefd=False),
        sys.stdout.buffer,
    )


@fleet_app.command("work")
def work(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Name the folder of a tuning or a run.")],
    device: DeviceOption = "auto",
    name: Annotated[
        str,
        typer.Option(
            "--name", metavar="NAME", help="Name the worker. Default: a name of host, device and process."
        ),
    ] = "",
    cores: Annotated[
        str, typer.Option("--cores", metavar="PROCESSORS", help="Pin this worker to these processors.")
    ] = "",
    parent: Annotated[
        int, typer.Option("--parent", metavar="PID", help="End with this process, which started the worker.")
    ] = 0,
    ignore_preflight: IgnoreOption = False,
    races: Annotated[
        bool,
        typer.Option("--races", hidden=True, help="Get ready for races before the machine is looked at."),
    ] = False,
) -> None:
    """Do the tasks of FOLDER on one device until there are none. Any machine that shares the folder may."""
    from cudadent42.base.progress import observer
    from cudadent42.commands.common import console_for
    from cudadent42.fleet.folder import FOLDER
    from cudadent42.fleet.perform import worker_of_races
    from cudadent42.fleet.queue import Queue
    from cudadent42.fleet.task import plain_name
    from cudadent42.fleet.worker import identify
    from cudadent42.fleet.worker import work as do_tasks

    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",") if core.isdigit()})
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is not a folder; expected the folder of a tuning, or of a run with --fleet"
        )
    root = real_path(folder)
    ahead = worker_of_races(root / f"{plain_name(name) or os.getpid()}.log") if races else None
    with closing(ahead) if ahead is not None else nullcontext():
        identity = identify(
            device,
            name,
            part=f"cores{cores.replace(',', '-')}" if cores else "",
            ignore_preflight=ignore_preflight,
        )
        with observer(console_for(stderr=True), True) as watcher:
            do_tasks(root, Queue(root / FOLDER), identity, watcher, parent=parent, ahead=ahead)
