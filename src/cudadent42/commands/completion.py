"""What the shell's completion suggests as an option's value. Nothing here imports PyTorch."""

from __future__ import annotations

from collections.abc import Iterable


def suites(incomplete: str) -> list[str]:
    """Built-in suites."""
    from cudadent42.suites.loader import builtin_suites

    return _beginning(incomplete, builtin_suites())


def gates(incomplete: str) -> list[str]:
    """Built-in gates."""
    from cudadent42.stages.gates.loader import builtin_gates

    return _beginning(incomplete, builtin_gates())


def dtypes(incomplete: str) -> list[str]:
    return _beginning(incomplete, ("fp16", "bf16", "fp32"))


def devices(incomplete: str) -> list[str]:
    return _beginning(incomplete, ("auto", "cpu", "cuda"))


def remotes(incomplete: str) -> list[str]:
    """Machines that `remote add` named; none where their file cannot be read."""
    from cudadent42.base.errors import LabError
    from cudadent42.remote.core import hosts

    try:
        return _beginning(incomplete, hosts.remotes())
    except (LabError, OSError):
        return []


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
