"""Run as another user by test_cache_attack.py: plants code where a victim's compile cache is, until it is killed.

Arguments: the way of attacking, the folder it may write to, the name of the cache in it, a library whose answer is not
the victim's, a file of the recipes and their keys, and this user's number. Uses the standard library alone, as its
user may not be able to read anything else.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path


def main() -> None:
    way, ground, cache, library, recipes, user = sys.argv[1:]
    foreign = Path(library).read_bytes()
    keys = json.loads(Path(recipes).read_text())
    os.setgid(int(user))
    os.setuid(int(user))
    os.umask(0)
    print("ready", flush=True)
    turn = 0
    while True:
        turn += 1
        try:
            WAYS[way](Path(ground), cache, foreign, keys, turn)
        except OSError:
            continue


def plant(folder: Path, foreign: bytes, keys: dict[str, object]) -> None:
    """Whole entries with right digests, under every name that the victim may ask for."""
    for key, recipe in keys.items():
        record = {
            "format": 1,
            "recipe": recipe,
            "suffix": ".so",
            "artifact_sha256": hashlib.sha256(foreign).hexdigest(),
            "artifact_bytes": len(foreign),
            "compile_seconds": 0.1,
            "created_unix": 0,
            "log": "",
            "resources": None,
        }
        for name, content in ((".so", foreign), (".json", json.dumps(record).encode())):
            path = folder / (key + name)
            try:
                path.unlink(missing_ok=True)
                path.write_bytes(content)
                path.chmod(0o755)
            except OSError:
                continue


def swap(ground: Path, cache: str, foreign: bytes, keys: dict[str, object], turn: int) -> None:
    """The whole folder for one of this user's, and back."""
    mine, aside = ground / "mine", ground / "aside"
    if not mine.exists():
        mine.mkdir(mode=0o755)
        plant(mine, foreign, keys)
    (ground / cache).rename(aside)
    mine.rename(ground / cache)
    (ground / cache).rename(mine)
    aside.rename(ground / cache)


def link(ground: Path, cache: str, foreign: bytes, keys: dict[str, object], turn: int) -> None:
    """A link to this user's folder, or the folder itself, where the victim's is to be made."""
    mine = ground / f"mine-{turn % 2}"
    if not mine.exists():
        mine.mkdir(mode=0o777)
        plant(mine, foreign, keys)
    if turn % 2:
        (ground / cache).symlink_to(mine)
        (ground / cache).unlink()
    else:
        shutil.copytree(mine, ground / cache)
        shutil.rmtree(ground / cache)


def fill(ground: Path, cache: str, foreign: bytes, keys: dict[str, object], turn: int) -> None:
    """Entries into a cache that is open now and then."""
    plant(ground / cache, foreign, keys)


WAYS = {"swap": swap, "link": link, "fill": fill}

if __name__ == "__main__":
    main()
