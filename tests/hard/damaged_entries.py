"""Random damage to entries of a compile cache, which must then be built again or found whole, and raise nothing.

Arguments: the first seed, how many. Prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from cudadent42.base.compile_cache import clear, entries
from flashmoe_science.jit.cache import Compilation, CompileCache, recipe_key
from flashmoe_science.jit.records import Recipe, Resources

ARTIFACT = bytes(range(256)) * 8
RECIPE = Recipe("probe", "host", "x86-64", {"head_dim": 64}, "g++", "12", ("-O3",), {"probe.cpp": "00"})
RESOURCES = Resources(128, 0, 4, 16, 1024, 65536, 256, 1, 0.5)
NUMBERS = (-1, 0, 1e308, 10**400, float("nan"), float("-inf"), 2**63, True, None, "", "\x1b]0;x\x07", [], {})


def compile_to(path: Path) -> Compilation:
    path.write_bytes(ARTIFACT)
    return Compilation(log="said the compiler", resources=RESOURCES)


def cut(path: Path, generator: random.Random) -> None:
    os.truncate(path, generator.randrange(path.stat().st_size + 1))


def flip(path: Path, generator: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(generator.choice((1, 1, 5, 50)) if content else 0):
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    path.write_bytes(content)


def insert(path: Path, generator: random.Random) -> None:
    content = path.read_bytes()
    at = generator.randrange(len(content) + 1)
    path.write_bytes(content[:at] + generator.randbytes(generator.randint(1, 40)) + content[at:])


def noise(path: Path, generator: random.Random) -> None:
    path.write_bytes(generator.randbytes(generator.choice((0, 1, 100, 5000))))


def deep(path: Path, generator: random.Random) -> None:
    path.write_text(
        generator.choice(("[", '{"a":', "[{", '{"recipe":{"flags":[')) * generator.choice((50, 100_000))
    )


def huge(path: Path, generator: random.Random) -> None:
    os.truncate(path, generator.choice((1 << 24, 1 << 40)))


def gone(path: Path, generator: random.Random) -> None:
    path.unlink()


def folder(path: Path, generator: random.Random) -> None:
    path.unlink()
    (path / "inner").mkdir(parents=True)


def link(path: Path, generator: random.Random) -> None:
    path.unlink()
    path.symlink_to(generator.choice(("/etc/passwd", path.name, "/dev/zero", "missing", "..")))


def fifo(path: Path, generator: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def second_name(path: Path, generator: random.Random) -> None:
    other = path.with_suffix(".other")
    other.unlink(missing_ok=True)
    os.link(path, other)


def mode(path: Path, generator: random.Random) -> None:
    path.chmod(generator.randrange(0o1000) | 0o400)


def field(path: Path, generator: random.Random) -> None:
    """A field of the record, at any depth, becomes something else."""
    if path.suffix != ".json":
        return flip(path, generator)
    record = at = json.loads(path.read_text())
    while True:
        name = generator.choice(list(at))
        if isinstance(at[name], dict) and at[name] and generator.randrange(2):
            at = at[name]
            continue
        if generator.randrange(4):
            at[name] = generator.choice(NUMBERS)
        else:
            del at[name]
        path.write_text(json.dumps(record))
        return None


DAMAGES: tuple[Callable[[Path, random.Random], object], ...] = (
    *(cut, flip, insert, noise, deep, huge, gone, folder, link, fifo, second_name, mode),
    *(field, field, field),
)


def attempt(directory: Path, generator: random.Random) -> None:
    cache = CompileCache(directory)
    key = recipe_key(RECIPE)
    cache.get_or_build(RECIPE, ".so", compile_to)
    for suffix in generator.sample((".so", ".json", ".lock"), generator.choice((1, 1, 1, 2, 3))):
        path = directory / (key + suffix)
        if path.is_file():
            # The lock of an earlier attempt: made huge, or a link, through which another file would be damaged.
            if path.is_symlink() or path.stat().st_size > 1 << 20:
                path.unlink()
                continue
            generator.choice(DAMAGES)(path, generator)
    # What says that it is whole is whole.
    entry = cache.read(recipe_key(RECIPE))
    assert (entry is None) == (cache.content(key) is None)
    assert cache.content(key) in (None, ARTIFACT)
    assert len(entries(cache)) == (entry is not None)
    if generator.randrange(10) == 0:
        clear(cache)
    assert cache.get_or_build(RECIPE, ".so", compile_to).recipe == RECIPE
    assert cache.get_or_build(RECIPE, ".so", compile_to).cached
    assert cache.content(key) == ARTIFACT


def main() -> None:
    seed, count = map(int, sys.argv[1:3])
    directory = Path(tempfile.mkdtemp())
    try:
        for number in range(seed, seed + count):
            print(f"seed {number}", file=sys.stderr, flush=True)
            attempt(directory / "cache", random.Random(number))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(json.dumps({"done": count}))


if __name__ == "__main__":
    main()
