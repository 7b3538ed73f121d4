"""TOML files of every kind that the lab reads: shipped ones, damaged."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import hostile

import cudadent42

_PACKAGE = Path(cudadent42.__file__).parent
_SKY = """name = "gpu"
accelerators = "L4:1"
cloud = "gcp"
region = "us-central1"
idle_minutes = 10
"""


_SPACE = """schema_version = 1
name = "tiles"
kernel = "cudadent42[portable]"
where = ["not overlap or block_n == 48", "block_n * 2 <= 128"]
regions = ["seqlen_q"]

[space]
block_n = [32, 48, 64]
overlap = [true, false]
"""
_TABLE = """schema_version = 1

[[entry]]
kernel = "attention.portable"
digest = "6f0c"
device = "NVIDIA H200"
multiprocessors = 132
settings = { block_n = 48 }
same = { dtype = "bf16", causal = false, head_dim = 128 }
between = { seqlen_q = [1024, 4096], seqlen_k = [1024, 4096] }
ratio = 1.054
interval = [1.041, 1.067]
evidence = ["a/run"]
file = "6f0c-a.toml"
"""
_CAPTURED = """name = "captured"
description = "a recorded script"
operation = "attention"
dtypes = ["fp32"]
baseline = "sdpa"
implementations = ["sdpa", "cudadent42"]

[script]
recording = "9f86d081884c7d65"
command = ["train.py", "--steps", "20"]
device = "cpu"
seconds = [12.4, 12.6, 12.5]
notes = ["one"]

[[script.unchanged]]
what = "attention, 8"
reason = "dropout"
calls = 12
seconds = [0.31, 0.3, 0.31]

[[script.elsewhere]]
suite = "captured-moe.toml"
calls = 3
seconds = [0.1, 0.1, 0.1]

[[case]]
name = "b8"
dtype = "fp32"
batch = 8
num_heads = 4
seqlen = 128
head_dim = 32
causal = true
softmax_scale = 0.2
query_strides = [49152, 32, 384]
key_strides = [49152, 32, 384]
value_strides = [49152, 32, 384]
calls = 400
seconds = [1.0, 1.1, 1.0]
spread = 0.1
ours = true
"""

_REMOTES = b'[gpu]\naddress = "ssh://user@127.0.0.1:1"\nfolder = "x"\n'
_START = ("session", "start", "x", "--protocol", "./it.toml", "--suite", "none")
_VALUES = (
    *("true", "0", "-1", "1e308", "nan", "inf", "9" * 30, "[]", "{}", "[[1]]", "''"),
    *("2026-01-01", "1979-05-27T07:32:00Z", "[" * 2000 + "]" * 2000),
)


@dataclass(frozen=True)
class Kind:
    """Files of one kind, and the command that reads one."""

    name: str
    examples: tuple[bytes, ...]
    path: str
    """Relative to the folder, or to the configuration folder where it begins with ``CONFIG/``."""
    command: tuple[str, ...]


def _texts(pattern: str) -> tuple[bytes, ...]:
    return tuple(path.read_bytes() for path in sorted(_PACKAGE.glob(pattern)))


@cache
def kinds() -> tuple[Kind, ...]:
    suites = _texts("suites/*.toml")
    gates = (*_texts("stages/gates/files/*.toml"), *_texts("session/data/gates/*.toml"))
    kernels = tuple(text.replace(b"@NAME@", b"mine") for text in _texts("scaffold/files/c*/@NAME@.toml"))
    return (
        Kind("suite", suites, "it.toml", ("run", "--suite", "./it.toml", "--implementations", "none.py:f")),
        Kind("gates", gates, "it.toml", ("gate", "../example/run", "--gate", "./it.toml")),
        Kind("kernel", kernels, "it.toml", ("run", "--implementations", "./it.toml,none.py:f")),
        Kind("rates", _texts("cost/rates.toml"), "CONFIG/rates.toml", ("cost", "rates")),
        Kind(
            "lesson", _texts("patterns/data/*.toml"), "it.toml", ("patterns", "add", "it.toml", "--replace")
        ),
        Kind(
            "protocol",
            _texts("session/data/protocols/*.toml"),
            "it.toml",
            _START,
        ),
        Kind(
            "remotes",
            (_REMOTES,),
            "CONFIG/remotes.toml",
            ("remote", "list"),
        ),
        Kind("specification", (_specification(),), "it.toml", ("remote", "add", "x", "--spec", "it.toml")),
        Kind("sky", (_SKY.encode(),), "it.toml", ("run", "--on", "sky://it.toml")),
        Kind("space", (_SPACE.encode(),), "it.toml", ("tune", "run", "it.toml", "--suite", "none")),
        Kind(
            "tuned table",
            (_TABLE.encode(),),
            "CONFIG/../flashmoe_science/tuned/it.toml",
            ("tune", "check"),
        ),
        Kind(
            "captured suite",
            (_CAPTURED.encode(),),
            "it.toml",
            ("run", "--suite", "./it.toml", "--implementations", "none.py:f"),
        ),
    )


def _specification() -> bytes:
    """The one in the documentation."""
    page = (Path(__file__).parents[2] / "docs/cloud.md").read_text(encoding="utf-8")
    return page.partition("```toml\n")[2].partition("```")[0].encode()


def write(chance: random.Random, folder: Path, config: Path) -> list[str]:
    """A damaged file in its place; the arguments of the command that reads it."""
    kind = chance.choice(kinds())
    path = config / "cudadent42" / kind.path[7:] if kind.path.startswith("CONFIG/") else folder / kind.path
    path.parent.mkdir(parents=True, exist_ok=True)
    content = chance.choice(kind.examples)
    how = chance.random()
    if how < 0.45:
        content = "\n".join(_with_other_values(content.decode(), chance)).encode("utf-8", "surrogatepass")
    elif how < 0.95:
        content = hostile.damage_bytes(content, chance)
    path.write_bytes(content)
    if how >= 0.95:
        hostile.in_the_way(path, chance)
    return [*kind.command, *(["--json"] if chance.random() < 0.3 else [])]


def _with_other_values(text: str, chance: random.Random) -> Iterator[str]:
    lines = text.splitlines()
    wanted = {chance.randrange(len(lines)) for _ in range(3)} if lines else set()
    for number, line in enumerate(lines):
        key, equals, _ = line.partition(" = ")
        yield f"{key} = {_value(chance)}" if number in wanted and equals else line


def _value(chance: random.Random) -> str:
    if chance.random() < 0.5:
        return chance.choice(_VALUES)
    letters = (
        letter if letter.isalnum() or letter in " ./-_" else f"\\U{ord(letter):08x}"
        for letter in hostile.text(chance)
    )
    return f'"{"".join(letters)}"'
