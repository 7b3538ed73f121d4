"""Where figures of attention for serving are read: files of benchmarks/serving.py and serving_host.py."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cudadent42.base.errors import UsageError

Race = dict[str, Any]
Number = Callable[[Path], float]

FILES = ("decode", "window", "prefill", "queries", "split", "chunk", "fp8")
MUCH = 5e8
"""Bytes of keys and values from which rates are asked for."""
PEAK_BYTES_PER_US = 4.8e6
"""Of an H200's memory, as its maker states it."""


def races(folder: Path, part: str) -> list[Race]:
    """Of the files that the folder has: one that was made for one part has one."""
    rows = [
        race
        for path in (folder / f"{name}.json" for name in FILES)
        if path.exists()
        for race in json.loads(path.read_text(encoding="utf-8"))["races"]
        if race["part"] == part
    ]
    if not rows:
        raise UsageError(f"{folder} has no races of {part}")
    return rows


def ratios(rows: Iterable[Race], one: str, other: str) -> list[float]:
    """Time of one over time of the other, as each race states it; 1 over it where it states the inverse."""
    values = []
    for race in rows:
        stated = {(each["time_of"], each["over"]): each["ratio"] for each in race["ratios"]}
        if (one, other) in stated:
            values.append(stated[one, other])
        elif (other, one) in stated:
            values.append(1 / stated[other, one])
        else:
            raise UsageError(f"{race['race']} does not state {one} over {other}")
    return values


def rates(rows: Iterable[Race], name: str) -> list[float]:
    """Terabytes of keys and values in a second."""
    return [race["bytes_of_keys_and_values"] / race["us"][name] / 1e6 for race in rows]


def much(folder: Path) -> list[Race]:
    return [race for race in races(folder, "decode") if race["bytes_of_keys_and_values"] >= MUCH]


def least_rate(page: int) -> Number:
    return lambda folder: min(rates(much(folder), f"pages of {page}"))


def most_over_dense(page: int) -> Number:
    return lambda folder: max(ratios(much(folder), f"pages of {page}", "dense"))


def mean_of(part: str, one: str, other: str) -> Number:
    return lambda folder: statistics.geometric_mean(ratios(races(folder, part), one, other))


def least_of(part: str, one: str, other: str) -> Number:
    return lambda folder: min(ratios(races(folder, part), one, other))


def in_pages_of(page: int, part: str, one: str, other: str) -> Number:
    """Least of the races whose name ends so."""

    def read(folder: Path) -> float:
        rows = [race for race in races(folder, part) if race["race"].endswith(f"pages of {page}")]
        return min(ratios(rows, one, other))

    return read


def most_of_queries(count: str) -> Number:
    """Of our races, which have one query of each sequence too."""

    def read(folder: Path) -> float:
        rows = [race for race in races(folder, "queries") if count in race["us"]]
        return max(ratios(rows, count, "1"))

    return read


def share_of_peak(part: str, name: str) -> Number:
    return lambda folder: min(rates(races(folder, part), name)) * 1e6 / PEAK_BYTES_PER_US


def alone(part: str) -> Callable[[Path], list[Race]]:
    """Races of one sequence."""
    return lambda folder: [race for race in races(folder, part) if race["race"].startswith("1x")]


def most_us_alone(part: str, name: str) -> Number:
    return lambda folder: max(race["us"][name] for race in alone(part)(folder))


def least_alone(part: str, one: str, other: str) -> Number:
    return lambda folder: min(ratios(alone(part)(folder), one, other))


def most_at_best(part: str, over: str) -> Number:
    """Most over the races, where each takes the option that is best for it."""

    def read(folder: Path) -> float:
        return max(
            min(each["ratio"] for each in race["ratios"] if each["over"] == over)
            for race in races(folder, part)
        )

    return read


def most_at_one(part: str, over: str) -> Number:
    """Most over the races by the one option for all with which that is least. Each race names its options alike."""

    def read(folder: Path) -> float:
        by_way: dict[str, list[float]] = {}
        for race in races(folder, part):
            for each in race["ratios"]:
                if each["over"] == over:
                    by_way.setdefault(each["time_of"], []).append(each["ratio"])
        return min(map(max, by_way.values()))

    return read


def most_between(later: str, earlier: str) -> Number:
    """Microseconds between two points of a launch, most of all cases: parts-warm.json has kernels that end there."""

    def read(folder: Path) -> float:
        cases = json.loads((folder / "parts-warm.json").read_text(encoding="utf-8"))
        return float(max(case["us"][later] - case["us"][earlier] for case in cases))

    return read


def from_batch(part: str, fewest: int, one: str, other: str) -> Number:
    """Least over the races of so many sequences and more."""

    def read(folder: Path) -> float:
        rows = [race for race in races(folder, part) if int(race["race"].split("x")[0]) >= fewest]
        return min(ratios(rows, one, other))

    return read


def host_us(call: str, way: str) -> Number:
    """Microseconds: the median over processes of each one's least."""

    def read(folder: Path) -> float:
        turns = json.loads((folder / "host.json").read_text(encoding="utf-8"))["turns"]
        return statistics.median(turn["us"][call]["least"] for turn in turns if turn["way"] == way)

    return read
