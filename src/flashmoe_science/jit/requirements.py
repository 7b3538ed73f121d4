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
    project's own name need not be on an index.
    """
    pip = f"{shlex.quote(sys.executable or 'python3')} -m pip install"
    if (checkout / "pyproject.toml").is_file():
        folder = "." if checkout == Path.cwd() else str(checkout)
        return f"{pip} -e {shlex.quote(f'{folder}[{extra}]')}"
    return f"{pip} {' '.join(map(shlex.quote, _packages(extra)))}"


def _packages(extra: str) -> list[str]:
    """The extra's requirements as the installed project declares them."""
    try:
        declared = metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        declared = []
    parts = [line.partition(";") for line in declared]
    packages = [name.strip() for name, _, condition in parts if extra in _EXTRA.findall(condition)]
    return packages or [f"{_DISTRIBUTION}[{extra}]"]
