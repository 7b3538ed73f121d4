"""Tunings of a GPU elsewhere on their way into the package (``tools/ship_tuning.py``)."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulated import Simulated, setup

from cudadent42.base.errors import UsageError
from cudadent42.base.observer import Quiet
from cudadent42.tune.coordinator import Coordinator, Limits
from cudadent42.tune.journal import Device, TuningJournal, read
from flashmoe_science.tuned.table import parse_table

TOOLS = Path(__file__).resolve().parents[3] / "tools"
THERE = "/home/somebody/checkout"


@pytest.fixture(scope="module")
def tool() -> Any:
    sys.path.append(str(TOOLS))
    try:
        import ship_tuning
    finally:
        sys.path.remove(str(TOOLS))
    return ship_tuning


def tuning(folder: Path, kernel: str = "attention.small", digest: str = "a" * 64, **gains: float) -> Path:
    """Of a kernel of the library, as it comes back."""
    about = replace(
        setup(arms=4),
        kernel=kernel,
        kernel_digest=digest,
        device=Device("NVIDIA H200", 132),
        space=f"{THERE}/benchmarks/spaces/small.toml",
    )
    with TuningJournal(folder, about) as journal:
        engine = Simulated({name.replace("_", "="): gain for name, gain in gains.items()})
        assert Coordinator(folder, journal, about, Limits(), Quiet()).run(engine).finished
    for name in ("races/one", "confirmed/one"):
        (folder / name).mkdir(parents=True)
        (folder / name / "manifest.json").write_text(json.dumps({"file": f"{THERE}/src/k.cu"}))
    return folder


def test_a_table_its_evidence_and_what_it_comes_to(tool: Any, tmp_path: Path) -> None:
    results, tables = tmp_path / "results", tmp_path / "tables"
    cells = tool.ship(tuning(tmp_path / "h200-small", BLOCK_2=0.10), "2026-01-02", results, tables)
    folder = results / "2026-01-02-h200-tuned-small"
    assert not (folder / "races").exists()
    assert THERE not in "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    assert json.loads((folder / "confirmed/one/manifest.json").read_text()) == {"file": "src/k.cu"}
    state_there, entries = read(folder)
    assert state_there.space == "benchmarks/spaces/small.toml"
    assert entries
    (table,) = tables.glob("*.toml")
    entry = parse_table(table.read_text(), str(table))[0]
    assert entry.settings == {"BLOCK": 2}
    assert all(each.startswith(f"{folder.name}/confirmed/") for each in entry.evidence)
    said = tool.summarise(cells, results / "2026-01-02-h200-tuned")
    assert (said["cells"], said["tuned"], said["slower"]) == (2, 2, 0)
    assert said["geomean"] == pytest.approx(1.10, abs=0.01)


def test_cells_of_the_default_count_as_what_they_are(tool: Any, tmp_path: Path) -> None:
    cells = tool.ship(tuning(tmp_path / "h200-none"), "2026-01-02", tmp_path / "results", tmp_path / "tables")
    assert not (tmp_path / "tables").exists()
    more = tool.ship(
        tuning(tmp_path / "h200-some", BLOCK_1=0.21), "2026-01-02", tmp_path / "results", tmp_path / "t"
    )
    summary = tmp_path / "results/2026-01-02-h200-tuned"
    tool.summarise(cells, summary)
    said = tool.summarise(more, summary)
    assert (said["cells"], said["tuned"]) == (4, 2)
    assert said["geomean"] == pytest.approx(1.10, abs=0.01)
    assert tool.summarise(more, summary) == said  # a tuning counts once


def test_what_is_there_is_not_overwritten(tool: Any, tmp_path: Path) -> None:
    made = tuning(tmp_path / "h200-none")
    tool.ship(made, "2026-01-02", tmp_path / "results", tmp_path / "tables")
    with pytest.raises(UsageError, match="give another --date"):
        tool.ship(made, "2026-01-02", tmp_path / "results", tmp_path / "tables")


def test_what_is_refused_leaves_nothing(tool: Any, tmp_path: Path) -> None:
    """Arms of a kernel in a file are paths, and a tuning that was brought from elsewhere says what it likes."""
    results, tables = tmp_path / "results", tmp_path / "tables"
    own = tuning(tmp_path / "h200-own", kernel="file:k", BLOCK_2=0.10)
    with pytest.raises(UsageError, match="only the library's go into the package"):
        tool.ship(own, "2026-01-02", results, tables)
    linked = tuning(tmp_path / "h200-linked", BLOCK_2=0.10)
    (tmp_path / "private.txt").write_text("private")
    (linked / "notes.txt").symlink_to(tmp_path / "private.txt")
    with pytest.raises(UsageError, match=r"notes\.txt is a link"):
        tool.ship(linked, "2026-01-02", results, tables)
    damaged = tuning(tmp_path / "h200-damaged", digest="../k", BLOCK_2=0.10)
    with pytest.raises(UsageError, match="expected a SHA-256"):
        tool.ship(damaged, "2026-01-02", results, tables)
    assert not tables.exists()
    assert not list(results.glob("*"))
