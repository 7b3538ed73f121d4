"""Arms as implementations that the lab can race: kernel files with other macros, or variants of a library's kernel."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cudadent42.base.errors import UsageError
from cudadent42.base.files import write_text
from cudadent42.base.paths import real_path
from cudadent42.base.reading import read_text
from cudadent42.base.toml import parse_toml
from cudadent42.model.implementations import OURS
from cudadent42.native.writing import kernel_file_text
from cudadent42.tune.space import DEFAULT, Arm, Space, shown

FOLDER = "arms"
"""Of the kernel files, in the tuning's folder."""


def implementations(space: Space, arms: Sequence[Arm], folder: Path) -> dict[str, str]:
    """The implementation of each arm, by the arm's name; those of a kernel's file are files in ``folder``."""
    if space.of_library:
        return {arm.name: variant(space, arm) for arm in arms}
    return {
        arm.name: space.kernel if arm.name == DEFAULT else str(folder / FOLDER / f"{file_stem(arm)}.toml")
        for arm in arms
    }


def materialise(space: Space, arms: Sequence[Arm], folder: Path) -> dict[str, str]:
    """`implementations`, with the files written that are not there.

    Raises UsageError where a file cannot be written, or an expression of the launch gives no sensible number.
    """
    names = implementations(space, arms, folder)
    if space.of_library:
        return names
    source = Path(space.kernel)
    document = parse_toml(read_text(source), str(source))
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    for arm in arms:
        if arm.name != DEFAULT:
            path = Path(names[arm.name])
            text = kernel_text(space, arm, document, source)
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                write_text(path, text)
    return names


def variant(space: Space, arm: Arm) -> str:
    """The name of a library's arm; the default is what the library does by itself."""
    if arm.name == DEFAULT:
        return OURS
    fields = ",".join(f"{name}={shown(value)}" for name, value in arm.settings.items())
    return f"{space.kernel[:-1]},{fields}]"


def file_stem(arm: Arm) -> str:
    """Short, and different for different settings."""
    return "arm-" + hashlib.sha256(arm.name.encode()).hexdigest()[:12]


def kernel_text(space: Space, arm: Arm, document: Mapping[str, Any], source: Path) -> str:
    """The kernel's file with the arm's macros in every configuration, and the launch that follows from them."""
    launch = {name: expression.value(arm.settings) for name, expression in space.launch.items()}
    for name, value in launch.items():
        if not isinstance(value, int) or value < 0:
            raise UsageError(f"{space.path}, launch.{name} gives {value} for {arm.name}; expected 0 or more")
    configurations = [
        {**each, "macros": {**each.get("macros", {}), **arm.settings}, **launch}
        for each in document.get("configuration") or [{}]
    ]
    changed = {
        **document,
        "name": file_stem(arm),
        "description": arm.name,
        "source": str(real_path(source.parent / document["source"])),
        "configuration": configurations,
    }
    return kernel_file_text(changed, f"{space.name}: {arm.name}")
