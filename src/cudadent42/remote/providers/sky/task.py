"""SkyPilot's task of one run: what is copied there, and what makes the machine ready and runs.

SkyPilot sets a machine's idle limit only after the section ``setup`` has passed, and leaves a machine up whose setup
failed. So there is none: the machine is made ready as the first part of ``run``.

The text is JSON, which is YAML, so nothing has to be escaped by hand; what a shell reads in it is quoted for one.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cudadent42.cost.rates import RATE_VARIABLE
from cudadent42.remote.core.hosts import DEFAULT_FOLDER
from cudadent42.remote.providers.sky.spec import Spec

_INCOMING = f"~/{DEFAULT_FOLDER}-incoming"
_SCRIPT = f"{_INCOMING}/job.sh"
_TREE = f"{_INCOMING}/tree.tar"


@dataclass(frozen=True)
class Files:
    """What is copied there, as it is here."""

    script: Path
    tree: Path
    """The working tree, packed: SkyPilot's own copying leaves out what it takes for ignored."""
    digest: str


def task(spec: Spec, files: Files, job: str, device: str, arguments: Sequence[str]) -> str:
    """The task file's text."""
    document = {
        "name": spec.cluster,
        "resources": dict(spec.resources),
        "num_nodes": 1,
        "envs": {RATE_VARIABLE: spec.rate},
        "file_mounts": {_SCRIPT: str(files.script), _TREE: str(files.tree)},
        "run": _arrive(job) + _prepare(files.digest, device, spec.max_minutes) + _run(job, device, arguments),
    }
    return json.dumps(document, indent=2, ensure_ascii=True) + "\n"


def script(text: str) -> str:
    """job.sh as a file: it is written as the body of a function."""
    return f'main() {{\n{text}\n}}\nmain "$@"\n'


def _call(*words: str) -> str:
    return f"sh {_SCRIPT} {shlex.join(words)}"


_NOW = "$(cut -d. -f1 /proc/uptime)"
_LEFT = f"$((deadline - {_NOW}))"
"""Seconds; `timeout` takes 0 for no limit, and below 0 for an error."""


_ARRIVAL = "cudadent42 begins here with %s"


def arrival(job: str) -> str:
    """What the machine says when it begins with the task, somewhere in a line of the log."""
    return _ARRIVAL % job


def _arrive(job: str) -> str:
    """The task itself, should SkyPilot show it, does not contain what it says."""
    return f"printf '{_ARRIVAL}\\n' {shlex.quote(job)}\n"


def _prepare(digest: str, device: str, max_minutes: int) -> str:
    """Ends in ``Preflight OK``, or the run does not begin."""
    bootstrap = f"~/{DEFAULT_FOLDER}/tree/tools/bootstrap.sh {shlex.join(('--device', device))}"
    return "\n".join(
        (
            f"deadline=$(({_NOW} + {60 * max_minutes}))",
            f"{_call('receive', DEFAULT_FOLDER, digest)} <{_TREE} || exit 1",
            f"timeout {60 * max_minutes} {bootstrap} || exit 4",
            "",
        )
    )


def _run(job: str, device: str, arguments: Sequence[str]) -> str:
    """Lasts as long as the run, so that the machine is not idle before; its exit code is the run's."""
    return "\n".join(
        (
            f"{_call('start', DEFAULT_FOLDER, job, '', device, *arguments)} || exit 1",
            f"left={_LEFT}",
            f'[ "$left" -le 0 ] || timeout "$left" {_call("follow", DEFAULT_FOLDER, job, "0")}',
            _call("stop", DEFAULT_FOLDER, job),
            f"set -- $({_call('state', DEFAULT_FOLDER, job)})",
            'exit "${2:-1}"',
            "",
        )
    )
