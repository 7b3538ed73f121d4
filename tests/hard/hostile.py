"""Values and damages that nobody means well with."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

TEXTS = (
    "",
    " ",
    "-",
    "--",
    "-x",
    "0",
    "-1",
    "1e308",
    "1e-320",
    "nan",
    "inf",
    "9" * 400,
    "1_000",
    "0x10",
    "true",
    "none",
    "default",
    "small",
    "cpu",
    "cuda:99",
    "fp32",
    "tiny",
    "pytorch",
    "~nouser42/x",
    "~",
    ".",
    "..",
    "../x",
    "x/../../y",
    "missing.toml",
    "missing.py:f",
    "missing.toml:f",
    "a,b,,c",
    "x" * 5000,
    "é" * 300,
    "名前",
    "\u202egnp.exe\u2066",
    "\x1b[2J\x1b]0;owned\x07",
    "\x9b31m\r\b\x7f",
    "\u200b\ufeff\u2028\u2029",
    "\ud800".encode("utf-8", "surrogatepass").decode("utf-8", "replace"),
    "[bold]x[/bold]",
    "{0}%s%n${HOME}`id`;&|<script>",
    "ssh://",
    "ssh://:0/",
    "sky://missing.toml",
    "://",
    "sqlite://",
    "postgresql://127.0.0.1:1/x?password=secret",
    "12:34:56",
    "2026-13-45",
    "50 %",
    "5 %%",
    "$1",
    "HEAD",
    "WORKTREE",
    "--json",
)

VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    10**18,
    10**400,
    1e308,
    -1e300,
    5e-324,
    "nan",
    "inf",
    "",
    "\x1b[2J\u202e",
    "x" * 5000,
    "../../x",
    "/dev/null",
    [],
    {},
    [[]],
    {"": {"": None}},
    "2026-01-01T00:00:00",
    "9999-99-99T99:99:99+99:99",
)


def text(chance: random.Random) -> str:
    """One of `TEXTS`, or letters from anywhere in Unicode (no zero byte: an argument cannot have one)."""
    if chance.random() < 0.8:
        return chance.choice(TEXTS)
    letters = (
        chr(chance.choice((chance.randrange(1, 0x300), chance.randrange(1, 0xD800))))
        for _ in range(chance.randrange(40))
    )
    return "".join(letters)


def damage_bytes(content: bytes, chance: random.Random) -> bytes:
    """The content with some of it changed, lost, repeated, or put elsewhere."""
    data = bytearray(content)
    for _ in range(chance.randrange(1, 5)):
        start = chance.randrange(len(data) + 1)
        end = min(len(data), start + chance.choice((1, 2, 8, 100, 5000)))
        kind = chance.randrange(6)
        if kind == 0:
            del data[start:end]
        elif kind == 1:
            data[start:end] = chance.randbytes(end - start)
        elif kind == 2:
            data[start:start] = data[start:end] * chance.randrange(1, 4)
        elif kind == 3:
            data[start:start] = text(chance).encode()
        elif kind == 4:
            data[start:start] = chance.choice((b"[", b"{", b'"', b"\n", b"\0", b"\xff")) * chance.choice(
                (1, 3, 100, 20_000)
            )
        else:
            del data[start:]
    return bytes(data)


def damage_json(content: bytes, chance: random.Random) -> bytes:
    """The document with some values in the place of others: it can be parsed, and means nothing."""
    try:
        document = json.loads(content)
    except ValueError:
        return damage_bytes(content, chance)
    for _ in range(chance.randrange(1, 4)):
        _replace_one(document, chance)
    if chance.random() < 0.05:
        return b"[" * 100_000 + json.dumps(document).encode() + b"]" * 100_000
    return json.dumps(document).encode()


def _replace_one(document: Any, chance: random.Random) -> None:
    here = document
    while isinstance(here, (dict, list)) and here:
        keys = list(here) if isinstance(here, dict) else list(range(len(here)))
        key = chance.choice(keys)
        deeper = here[key]
        if not isinstance(deeper, (dict, list)) or not deeper or chance.random() < 0.2:
            kind = chance.randrange(6)
            if kind == 0 and isinstance(here, dict):
                del here[key]
            elif kind == 1 and isinstance(here, dict):
                here[text(chance)] = copy.deepcopy(deeper)
            elif kind == 2:
                here[key] = text(chance)
            else:
                here[key] = copy.deepcopy(chance.choice(VALUES))  # which the next damage changes
            return
        here = deeper


def in_the_way(path: Path, chance: random.Random) -> None:
    """Something else in the place of a file: nothing, a folder, a link, a pipe, a hole of 200 GB."""
    path.unlink()
    kinds: tuple[Callable[[], object], ...] = (
        lambda: None,
        path.mkdir,
        lambda: path.symlink_to(path),
        lambda: path.symlink_to("/dev/zero"),
        lambda: os.mkfifo(path),
        lambda: (path.touch(), os.truncate(path, 200 << 30)),
        path.touch,
        lambda: (path.touch(), path.chmod(0)),
    )
    chance.choice(kinds)()
