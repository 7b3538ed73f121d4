#!/usr/bin/env python3
"""Writes requirements/*.txt anew: every package that the scripts and workflows install, pinned, with its hashes.

    python tools/lock.py              # needs uv (pip install uv) and the network
    python tools/lock.py --upgrade    # takes the newest versions; without it, what is pinned stays where it can

From pyproject.toml's dependencies, extras and groups, and the torch of constraints.txt. One resolution covers Python
3.10 to 3.14 on Linux (x86-64 and arm) and macOS (arm), so that all files agree. Then each file is tried on each of
them: pip takes no source archives there. docs/dependencies.md says which file is for what.

The hashes of torch's CPU builds are those of PyTorch's own index. Where it cannot be reached the ones that
requirements/torch-cpu.txt has are kept, if they are of the same version. Exit code 0, or 2 if it cannot run.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "requirements"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28", "aarch64-apple-darwin")
OLDEST_MACOS = "14.0"
"""For which torch has wheels."""
INDEX = "https://pypi.org/simple"
CPU_INDEX = "https://download.pytorch.org/whl/cpu/torch/"
TIMEOUT_S = 60

EDITABLE = "editables"
"""What hatchling's backend asks for where it builds for ``pip install --editable``."""

PIP = "pip>=25.1"
"""The tests ask it for a dependency group."""

# Packages of the CUDA build of torch alone.
CUDA_BUILD = re.compile(r"nvidia-|cuda-|triton")
HEADER = "# Written by tools/lock.py from pyproject.toml and constraints.txt.\n"


class CannotLockError(Exception):
    """What is missing, and what to do."""


def groups() -> dict[str, list[str]]:
    """The requirements of each file by its name, but those with torch."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, development = document["project"], document["dependency-groups"]
    extras = project["optional-dependencies"]
    base = [each for each in project["dependencies"] if not re.match(r"torch\b", each)]
    backend = [each for each in development["dev"] if each.startswith("hatchling")]
    return {
        "run": [*base, *extras["lab"], *extras["ledger"], *backend, EDITABLE],
        "dev": [*development["dev"], PIP],
        "build": backend,
        "checks": [*development["docs"], *extras["cu13"]],
        "compiler": extras["compiler"],
        "gpu": extras["gpu"],
    }


def torch_pin() -> str:
    """``torch==VERSION``."""
    lines = (ROOT / "constraints.txt").read_text().split()
    return next(line for line in lines if line.startswith("torch=="))


def uv() -> str:
    path = shutil.which("uv")
    if path is None:
        raise CannotLockError("uv was not found; install it: pip install uv")
    return path


def compiled(requirements: list[str], constraints: str, preferred: str = "") -> str:
    """What uv makes of them: every package and hash, with markers where versions differ.

    Args:
        constraints: pins that hold.
        preferred: pins that are kept where nothing speaks against them.
    """
    with tempfile.TemporaryDirectory() as name:
        given, kept, made = (Path(name) / file for file in ("given.in", "kept.txt", "made.txt"))
        given.write_text("\n".join(requirements) + "\n")
        kept.write_text(constraints)
        made.write_text(preferred)
        command = [
            *(uv(), "pip", "compile", "--quiet", "--universal", "--python-version", PYTHONS[0]),
            *("--generate-hashes", "--no-header", "--no-annotate", "--default-index", INDEX),
            *("--constraint", str(kept), "--output-file", str(made), str(given)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotLockError(f"uv could not resolve the requirements: {done.stderr.strip()[-1000:]}")
        return made.read_text()


def try_everywhere(folder: Path) -> None:
    """Each file has a wheel of each package for each platform and Python. Nothing is installed.

    But for ``torch-cpu.txt``, whose wheels are not on PyPI.

    Raises:
        CannotLockError: one has not; uv's reason.
    """
    for path in sorted(folder.glob("*.txt")):
        if path.stem == "torch-cpu":
            continue
        for system, python in itertools.product(PLATFORMS, PYTHONS):
            command = [
                *(
                    uv(),
                    "pip",
                    "install",
                    "--no-config",
                    "--quiet",
                    "--dry-run",
                    "--target",
                    str(folder / "none"),
                ),
                *("--python-platform", system, "--python-version", python, "--default-index", INDEX),
                *("--require-hashes", "--no-deps", "--only-binary", ":all:", "--requirement", str(path)),
            ]
            environment = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": OLDEST_MACOS}
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            if done.returncode:
                reason = done.stderr.strip()[-1000:]
                raise CannotLockError(
                    f"{path.name} cannot be installed by Python {python} on {system}: {reason}"
                )


def packages(text: str) -> dict[str, str]:
    """Each pin, a version and perhaps a marker, with its hashes, by the line it begins with."""
    hashed: dict[str, str] = {}
    pin = ""
    for line in text.splitlines(keepends=True):
        if line[0] not in " #\n":
            pin = line.rstrip(" \\\n")
        if pin and line[0] != "#":
            hashed[pin] = hashed.get(pin, "") + line
    return hashed


def name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower()


def without_hashes(text: str) -> str:
    return "".join(f"{pin}\n" for pin in packages(text))


def cpu_build(torch: str, version: str) -> str:
    """The packages of a CPU build: those of the other but CUDA's, and the wheels of PyTorch's own index."""
    kept = [
        text for pin, text in packages(torch).items() if not re.match(r"torch==|" + CUDA_BUILD.pattern, pin)
    ]
    hashes = sorted(cpu_hashes(version))
    lines = [f"torch=={version}+cpu", *(f"    --hash=sha256:{each}" for each in hashes)]
    return " \\\n".join(lines) + "\n" + "".join(kept)


def cpu_hashes(version: str) -> set[str]:
    pattern = re.compile(
        rf"torch-{re.escape(version)}%2Bcpu-cp31[0-4]-cp31[0-4]-manylinux_2_28_(?:x86_64|aarch64)\.whl#sha256=([0-9a-f]{{64}})"
    )
    try:
        with urllib.request.urlopen(CPU_INDEX, timeout=TIMEOUT_S) as answer:
            return set(pattern.findall(answer.read().decode()))
    except (urllib.error.URLError, TimeoutError) as error:
        before = FOLDER / "torch-cpu.txt"
        pins = packages(before.read_text()) if before.is_file() else {}
        if f"torch=={version}+cpu" not in pins:
            raise CannotLockError(
                f"{CPU_INDEX} cannot be reached for the hashes of {version}: {error}"
            ) from error
        print(f"{CPU_INDEX} cannot be reached; the hashes in {before.name} are kept", file=sys.stderr)
        return set(re.findall(r"sha256:([0-9a-f]{64})", pins[f"torch=={version}+cpu"]))


def pinned() -> str:
    """All pins of the files that are there, but for the build of torch that PyPI does not have."""
    files = (path for path in sorted(FOLDER.glob("*.txt")) if path.stem != "torch-cpu")
    pins = {pin for path in files for pin in packages(path.read_text())}
    return "".join(f"{pin}\n" for pin in sorted(pins))


def locks(preferred: str) -> dict[str, str]:
    """The content of each file; see `compiled` for what is preferred."""
    wanted, torch = groups(), torch_pin()
    requirements_of_all = [torch, *(each for group in wanted.values() for each in group)]
    everything = without_hashes(compiled(requirements_of_all, "", preferred))
    made = {"torch": compiled([torch], everything)}
    made["torch-cpu"] = cpu_build(made["torch"], torch.partition("==")[2])
    one_build_alone = {name_of(pin) for pin in packages(made["torch"])} - {
        name_of(pin) for pin in packages(made["torch-cpu"]) if name_of(pin) != "torch"
    }
    for name, requirements in wanted.items():
        # What depends on torch takes either build of it.
        left_out = one_build_alone - {name_of(each) for each in requirements}
        text = compiled(requirements, everything)
        made[name] = "".join(block for pin, block in packages(text).items() if name_of(pin) not in left_out)
    return {f"{name}.txt": HEADER + text for name, text in made.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--upgrade", action="store_true", help="take the newest version of every package")
    arguments = parser.parse_args()
    try:
        made = locks("" if arguments.upgrade else pinned())
        with tempfile.TemporaryDirectory() as name:
            for file, text in made.items():
                Path(name, file).write_text(text)
            try_everywhere(Path(name))
    except CannotLockError as error:
        print(f"lock: {error}", file=sys.stderr)
        return 2
    FOLDER.mkdir(exist_ok=True)
    for file, text in sorted(made.items()):
        (FOLDER / file).write_text(text)
        print(f"requirements/{file}: {len(packages(text))} pins")
    return 0


if __name__ == "__main__":
    sys.exit(main())
