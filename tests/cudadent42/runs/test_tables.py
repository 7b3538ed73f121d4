"""A run says which tables of the user's it asks: they change what is measured."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from cudadent42.model.records import MachineReport, Plan
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.runs.run_folder import RunWriter, load_run
from cudadent42.runs.tables import tables_of_user


def test_tables_of_the_user_are_on_record_where_they_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("FLASHMOE_TUNED", raising=False)
    assert tables_of_user() == {}
    folder = tmp_path / "flashmoe_science/tuned"
    folder.mkdir(parents=True)
    assert tables_of_user() == {}
    (folder / "b.toml").write_text("schema_version = 1\n")
    (folder / "a.toml").write_text("")
    (folder / "notes.txt").write_text("")
    os.mkfifo(folder / "pipe.toml")
    said = [
        f"{name} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
        for name, text in (("a.toml", ""), ("b.toml", "schema_version = 1\n"))
    ]
    assert tables_of_user() == {"tuned tables": ", ".join(said)}
    case = AttentionCase("one", "fp32", 1, 1, 1, 16, 16, 8)
    plan = Plan("unit", "cpu", (case,), "pytorch", ("pytorch",), repeats=1, warmup=0, seed=0)
    with RunWriter(tmp_path / "run", plan, MachineReport((), "", {}), None, ("test",)):
        pass
    assert load_run(tmp_path / "run").manifest.environment["tuned tables"] == ", ".join(said)
    monkeypatch.setenv("FLASHMOE_TUNED", "off")
    assert tables_of_user() == {}
