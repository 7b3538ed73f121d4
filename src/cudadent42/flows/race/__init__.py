"""A race between two states of a source tree: both built, verified and timed in one process, in paired blocks.

Only the tree's code differs; the lab is the one that runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from cudadent42.base.observer import Observer
from cudadent42.flows import pipeline
from cudadent42.flows.pipeline import Execute, Outcome
from cudadent42.model.records import Version
from cudadent42.plan import Choices, RunOptions
from cudadent42.runs.run_folder import RunWriter
from cudadent42.versions.sources import WORKING_TREE, export

__all__ = [
    "PRECISION",
    "WORKING_TREE",
    "Outcome",
    "RaceOptions",
    "name_versions",
    "race",
    "race_versions",
    "with_defaults",
]

SUITE = "race"
"""A few cases that suit the device."""

PRECISION = 0.005
"""Half-width of the interval at which a case is measured no longer: half the margin of the race suites, 1 %."""

BUDGET_S = 60.0
"""Time for the timing of a race, at most."""

DEFAULT_CHOICES = Choices(suite=SUITE, precision=PRECISION, budget_s=BUDGET_S)

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._~^@/-]+")
_SHORT = 8


@dataclass(frozen=True, kw_only=True)
class RaceOptions:
    """All that is asked of a race, besides the two versions."""

    run: RunOptions
    repository: Path | None = None
    """A folder in the git repository; the current one if None."""
    entry: str = ""
    """``path/to/file.py:callable`` or ``path/to/kernel.toml`` in the tree; empty for ``flashmoe_science``, and
    ``cudadent42[variant]`` for one of its kernels."""


def with_defaults(choices: Choices) -> Choices:
    """With the precision and the time of a race where the choices leave them open.

    Whoever gives a number of blocks, and no precision, wants that number.
    """
    if choices.precision is None and choices.repeats is None:
        choices = replace(choices, precision=PRECISION)
    return replace(choices, budget_s=BUDGET_S) if choices.budget_s is None else choices


def ignore_folder(folder: RunWriter) -> None:
    """For callers that do not need the folder before the race is over."""


def race(
    parent: str,
    child: str,
    options: RaceOptions,
    observer: Observer,
    opened: Callable[[RunWriter], None] = ignore_folder,
    execute: Execute = pipeline.execute,
) -> Outcome:
    """Race ``child`` against ``parent``: git revisions, ``WORKTREE`` or folders (see `versions.sources.export`).

    The parent is the baseline: a speed-up above 1 says that the child is faster. The run folder is like any other; its
    implementations are named after the revisions. ``opened`` is given the folder as soon as there is one; ``execute``
    stands in for `pipeline.execute`.

    Raises LabError where a tree cannot be had, does not build, or the race cannot go on.
    """
    pair = tuple(export(revision, options.repository, options.entry) for revision in (parent, child))
    return race_versions((pair[0], pair[1]), options, observer, opened, execute)


def race_versions(
    pair: tuple[Version, Version],
    options: RaceOptions,
    observer: Observer,
    opened: Callable[[RunWriter], None] = ignore_folder,
    execute: Execute = pipeline.execute,
) -> Outcome:
    """``race`` of two versions that were exported."""
    return pipeline.run(as_run(pair, options.run), observer, opened, execute)


def as_run(pair: tuple[Version, Version], options: RunOptions) -> RunOptions:
    """A race as a run like any other."""
    choices = replace(options.choices, implementations=())
    return replace(options, choices=choices, versions=name_versions(*pair))


def name_versions(parent: Version, child: Version) -> dict[str, Version]:
    """Readable names: the revision and what it stands for, ``main@4ea86ed8``. Two that are alike are numbered."""
    first, second = _name(parent), _name(child)
    if first == second:
        second += "-again"
    return {first: parent, second: child}


def _name(version: Version) -> str:
    state = version.commit[:_SHORT] or version.digest[:_SHORT]
    revision = _NOT_IN_NAMES.sub("-", version.revision).strip("-") or "tree"
    return state if version.commit.startswith(revision) else f"{revision}@{state}"
