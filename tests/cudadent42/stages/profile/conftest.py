"""Profiles recorded on an H200: kernels with a fault made on purpose, their mended twins, and good kernels."""

from __future__ import annotations

import gzip
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cudadent42.profiles.metrics import RawMetric, read_counters
from cudadent42.profiles.records import Launch, Profile, Source

ROOT = Path(__file__).resolve().parents[4]
FOLDER = ROOT / "benchmarks/results/2026-11-21-h200-profiles"
RECORDED = FOLDER / "profiles.json"
LATER = FOLDER / "profiles-later.json.gz"


def _read(path: Path) -> dict[str, Any]:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    document: dict[str, Any] = json.loads(content)
    return document


@pytest.fixture(scope="session")
def recorded() -> dict[str, Any]:
    """The committed file."""
    return _read(RECORDED)


@pytest.fixture(scope="session")
def profile_of(recorded: dict[str, Any]) -> Callable[..., Profile]:
    """The profile of a subject, with its counters or as it would be known without them."""
    return _maker(recorded)


@pytest.fixture(scope="session", params=[RECORDED, LATER], ids=["first", "later"])
def profile_in_each(request: pytest.FixtureRequest) -> Callable[..., Profile]:
    """As ``profile_of``, from each recording: the later is of another machine of the same kind."""
    return _maker(_read(request.param))


@pytest.fixture(scope="session")
def later_profile_of() -> Callable[..., Profile]:
    """As ``profile_of``, from the later recording."""
    return _maker(_read(LATER))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run made on an H200."""
    return shutil.copytree(FOLDER.parent / "2026-11-20-h200-hopper", tmp_path / "run")


def _maker(recorded: dict[str, Any]) -> Callable[..., Profile]:

    def make(name: str, *, counters: bool = True) -> Profile:
        subject = next(one for one in recorded["subjects"] if one["name"] == name)
        raw = {
            metric: RawMetric(math.nan if value is None else value, unit)
            for metric, (value, unit) in subject["metrics"].items()
        }
        counted = read_counters(subject["kernel"], raw)
        launch = Launch(
            kernel=subject["kernel"],
            duration_s=counted.values["time_s"],
            grid_blocks=int(counted.values["grid_blocks"]),
            block_threads=int(counted.values["block_threads"]),
            registers=int(counted.values["registers"]),
            shared_bytes=max(0, int(counted.values["shared_bytes"]) - 1024),
        )
        return Profile(
            schema_version=1,
            case=f"{name}/bf16",
            implementation="subject",
            device="cuda:0",
            device_name="NVIDIA H200",
            architecture="sm_90",
            kernel=subject["kernel"],
            source=Source.COUNTERS if counters else Source.MODEL,
            flops=subject["flops"],
            bytes_min=subject["bytes_min"],
            dtype="bf16",
            latency_ms=counted.values["time_s"] * 1e3,
            metrics=counted.values if counters else {"multiprocessors": 132.0},
            missing=counted.missing if counters else {},
            peaks=recorded["peaks"],
            launches=(launch,),
        )

    return make
