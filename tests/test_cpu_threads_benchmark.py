"""`benchmarks/cpu_threads.py`: which processors share a core or a node of memory."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    module = importlib.import_module("cpu_threads")
    monkeypatch.setattr(module, "_CPUS", tmp_path)
    return module


def machine(folder: Path, *processors: tuple[int, str]) -> None:
    """Node and siblings of each processor, as Linux names them."""
    for number, (node, siblings) in enumerate(processors):
        topology = folder / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{siblings}\n")
        (folder / f"cpu{number}" / f"node{node}").mkdir()


@pytest.mark.parametrize(
    ("processors", "ways"),
    [
        (((0, "0"), (0, "1")), {"all": [0, 1]}),
        (((0, "0-1"), (0, "0-1"), (0, "2-3"), (0, "2-3")), {"all": [0, 1, 2, 3], "one a core": [0, 2]}),
        (((0, "0,2"), (0, "1,3"), (0, "0,2"), (0, "1,3")), {"all": [0, 1, 2, 3], "one a core": [0, 1]}),
        (((0, "0"), (0, "1"), (1, "2"), (1, "3")), {"all": [0, 1, 2, 3], "one node": [0, 1]}),
    ],
)
def test_ways_to_call(
    benchmark: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    processors: tuple[tuple[int, str], ...],
    ways: dict[str, list[int]],
) -> None:
    machine(tmp_path, *processors)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(len(processors))))
    assert benchmark.ways() == ways
