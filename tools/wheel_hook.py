"""Packs a built wheel as tightly as deflate can: hatchling packs with zlib's default level, and has no setting."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PackTightly(BuildHookInterface[Any]):
    """Runs after each build of a wheel: `tool.hatch.build.targets.wheel.hooks.custom` in pyproject.toml names it."""

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        pack_tightly(Path(artifact_path))


def pack_tightly(archive: Path) -> None:
    """Write the archive again with its files in order, names, times and modes as they are, at zlib's level 9."""
    tight = archive.with_name(archive.name + ".tight")
    with zipfile.ZipFile(archive) as source, zipfile.ZipFile(tight, "w") as target:
        for each in source.infolist():
            target.writestr(each, source.read(each), zipfile.ZIP_DEFLATED, compresslevel=9)
    tight.chmod(archive.stat().st_mode)
    os.replace(tight, archive)
