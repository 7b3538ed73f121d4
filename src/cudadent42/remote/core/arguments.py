"""The arguments of ``run`` there, from what is asked for here. Files of the working tree become paths within it."""

from __future__ import annotations

from pathlib import Path

from cudadent42.base.errors import UsageError
from cudadent42.base.paths import real_path
from cudadent42.model.implementations import is_kernel_file, is_plug_in, plug_in_file
from cudadent42.plan import RunOptions


def forwarded(
    run: RunOptions, root: Path, here: Path, *, verbose: bool = False, as_json: bool = False
) -> tuple[str, ...]:
    """Options of ``cudadent42 run`` that mean the same in the working tree there, whose root it is run from.

    Raises UsageError where a file is named that is not in the working tree ``root``, so not sent.
    """
    choices = run.choices
    suite = _within(choices.suite, root, here) if choices.suite.endswith(".toml") else choices.suite
    options: dict[str, object] = {
        "--suite": suite,
        "--repeats": choices.repeats,
        "--warmup": choices.warmup,
        "--precision": choices.precision,
        "--budget": choices.budget_s,
        "--seed": choices.seed,
        "--timer": choices.timer.value if choices.timer else None,
        "--l2": choices.cache.value if choices.cache else None,
        "--dtype": ",".join(choices.dtypes) or None,
        "--case": ",".join(choices.cases) or None,
        "--implementations": ",".join(_implementation(name, root, here) for name in choices.implementations)
        or None,
        "--device": run.device,
    }
    accepted = tuple(f"--accept-missing={each.value}" for each in run.accepted_missing)
    flags = {
        "--no-save-csv": not run.save_samples,
        "--ignore-preflight": run.ignore_preflight,
        "--sealed": run.sealed,
        "--untrusted": run.untrusted,
        "--verbose": verbose,
        "--json": as_json,
    }
    # Joined by "=", so that no value is read as an option of its own.
    return (
        *(f"{name}={value}" for name, value in options.items() if value is not None),
        *(flag for flag, wanted in flags.items() if wanted),
        *accepted,
    )


def _implementation(name: str, root: Path, here: Path) -> str:
    if is_kernel_file(name):
        return _within(str(plug_in_file(name)), root, here)
    if not is_plug_in(name):
        return name
    _, _, attribute = name.rpartition(":")
    return f"{_within(str(plug_in_file(name)), root, here)}:{attribute}"


def _within(path: str, root: Path, here: Path) -> str:
    absolute = real_path(here / path)
    try:
        return str(absolute.relative_to(real_path(root)))
    except ValueError as error:
        raise UsageError(
            f"{path} is not in {root}, and only the working tree is sent there; copy it into the tree"
        ) from error
