"""The profile of a run folder, for its report."""

from __future__ import annotations

from pathlib import Path

from cudadent42.profiles import compare, store
from cudadent42.stages.report.view import Profiled


def load_profiled(folder: Path, before: Path | None) -> Profiled | None:
    """The folder's profile with its diagnosis, and the profile of the folder ``before``; None where it has none.

    Raises UsageError for files that cannot be understood, and where ``before`` has no profile.
    """
    profile, diagnosis = store.load_profile(folder), store.load_diagnosis(folder)
    if profile is None or diagnosis is None:
        return None
    return Profiled(profile, diagnosis, compare.load(before) if before is not None else None)
