"""How an optional package is installed where this code runs: from a checkout, or from a wheel."""

from __future__ import annotations

import re
import shlex
import sys
from importlib import metadata
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[3]
_DISTRIBUTION = "cudadent42"
_EXTRA = re.compile(r"""\bextra\s*==\s*["']([^"']+)["']""")


def install_command(extra: str, checkout: Path = _CHECKOUT) -> str:
    """The shell command that brings the packages of an extra of this project, such as ``cu13``.

    A checkout is installed again with the extra; beside an installed wheel the packages are named, since the
    project's own name need not be on an index. A copy of the sources alone names neither: there it is the checkout's,
    and says so behind the command.
    """
    pip = f"{shlex.quote(sys.executable or 'python3')} -m pip install"
    if (checkout / "pyproject.toml").is_file():
        folder = "." if checkout == Path.cwd() else str(checkout)
        return f"{pip} -e {shlex.quote(f'{folder}[{extra}]')}"
    packages = " ".join(map(shlex.quote, _packages(extra)))
    return f"{pip} {packages}" if packages else f"{pip} -e '.[{extra}]'  # in a checkout of {_DISTRIBUTION}"


def _packages(extra: str) -> list[str]:
    """The extra's requirements as the installed project declares them; none where it is not installed."""
    try:
        declared = metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        declared = []
    parts = [line.partition(";") for line in declared]
    return [name.strip() for name, _, condition in parts if extra in _EXTRA.findall(condition)]
