"""``tune`` as it is typed: what is refused and with which words, and what a tuning says of itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import made_command_line
from cudadent42.base.errors import UsageError
from cudadent42.base.observer import Quiet
from cudadent42.base.processor import cpu_name
from cudadent42.commands.tune import _rungs, seconds
from cudadent42.operations import definition
from cudadent42.preflight.definitions import Context
from cudadent42.scaffold import Kind, create
from cudadent42.tune.coordinator import STOP, Coordinator, Limits
from cudadent42.tune.journal import TuningJournal
from cudadent42.tune.prune import Target
from cudadent42.tune.table import table_text
from flashmoe_science.tuned.table import Region, TableEntry

sys.path.append(str(Path(__file__).parents[1] / "tune"))
from simulated import Simulated, setup

SPACE = 'schema_version = 1\nname = "s"\nkernel = "cudadent42[portable]"\n[space]\nblock_n = [32, 64, 4096]\n'


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("CUDADENT42_RATE", raising=False)
    (tmp_path / "s.toml").write_text(SPACE)
    return lambda *words: made_command_line.invoke("tune", *words, prog_name="cudadent42")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a tuning that is finished, in which an arm is faster."""
    path = tmp_path / "t"
    with TuningJournal(path, setup()) as journal:
        Coordinator(path, journal, setup(), Limits(), Quiet()).run(Simulated({"BLOCK=3": 0.06}))
    return path


@pytest.mark.usefixtures("nvrtc")
def test_a_dry_run_needs_no_gpu(invoke: Callable[..., Any]) -> None:
    words = ("s.toml", "--suite", "small", "--dry-run", "--gpu", "h200", "--dtype", "bf16", "--case", "tiny")
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    assert "3 configurations beside the default" in result.output
    assert "of shared memory per block" in result.output
    document = json.loads(invoke(*words, "--json").stdout)
    assert document["arms"] == 4
    assert [each["arm"] for each in document["compiled"]] == [
        "default",
        "block_n=32",
        "block_n=64",
        "block_n=4096",
    ]
    assert not Path("tunings").exists()


def test_a_dry_run_says_whether_a_search_proposes(invoke: Callable[..., Any], tmp_path: Path) -> None:
    create("k", Kind.CPU, tmp_path)
    (tmp_path / "k.toml").write_text(
        SPACE.replace("cudadent42[portable]", "k/k.toml").replace("block_n", "N")
    )
    words = ("k.toml", "--suite", "small", "--case", "tiny", "--dry-run", "--device", "cpu")
    every = invoke(*words)
    assert every.exit_code == 0, every.output
    assert "every one would be raced, as there are 3, and up to 500 are" in " ".join(every.output.split())
    searched = " ".join(invoke(*words, "--search", "optuna").output.split())
    assert "a search would propose up to 384 configurations, as --search optuna asks for" in searched
    document = json.loads(invoke(*words, "--budget", "5s", "--json").stdout)
    assert document["most"] == 384
    assert document["why"].startswith("as all 3 would take about")
    assert [each["arm"] for each in document["compiled"]] == ["default"]


def test_a_dry_run_says_that_the_default_cannot_be_raced(invoke: Callable[..., Any], tmp_path: Path) -> None:
    """Its file lacks a macro: then no configuration has anything to race against."""
    create("k", Kind.CPU, tmp_path)
    with (tmp_path / "k/k.cpp").open("a") as source:
        source.write("\nCUDADENT42_EXPORT int size(void) { return N; }\n")
    (tmp_path / "k.toml").write_text(
        SPACE.replace("cudadent42[portable]", "k/k.toml").replace("block_n", "N")
    )
    words = (
        "k.toml",
        "--suite",
        "small",
        "--case",
        "tiny",
        "--dtype",
        "fp32",
        "--dry-run",
        "--device",
        "cpu",
    )
    said = " ".join(invoke(*words).output.split())
    assert "tiny/fp32: none would be raced, as the default itself cannot be:" in said
    assert "'N' was not declared" in said


def test_a_dry_run_is_of_the_device_that_a_tuning_would_be_of(
    invoke: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --gpu on a machine that has a GPU, that is the GPU."""
    asked: list[str] = []

    def target(device: str) -> Target:
        asked.append(device)
        raise UsageError("asked")

    monkeypatch.setattr("cudadent42.tune.opening._target", target)
    for present, device in ((True, "cuda:0"), (False, "cpu")):
        monkeypatch.setattr(Context, "wants_gpu", present)
        invoke("s.toml", "--suite", "small", "--dry-run", "--dtype", "bf16", "--case", "tiny")
        assert asked.pop() == device


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("none.toml",), "cannot read the space none.toml"),
        (("s.toml", "--gpu", "H200"), "--gpu is for --dry-run"),
        (("s.toml", "--dry-run", "--gpu", "H900"), "expected one of T4"),
        (("s.toml", "--rungs", "6,4"), "expected rising numbers of blocks"),
        (("s.toml", "--margin", "nan"), "expected a share from 0 to below 1"),
        (("s.toml", "--margin", "100 %"), "expected a share from 0 to below 1"),
        (("s.toml", "--margin", "-1 %"), "expected a share from 0 to below 1"),
        (("status", "none"), "holds no tuning"),
        (("stop", "none"), "holds no tuning"),
        (("resume", "none"), "holds no tuning"),
        (("statsu", "none"), "neither a command `tune statsu` nor a space statsu (did you mean 'status'?)"),
    ],
)
def test_what_is_wrong_is_said(invoke: Callable[..., Any], words: tuple[str, ...], problem: str) -> None:
    result = invoke(*words)
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert problem in said or problem in said.replace(str(Path.cwd()) + "/", "")


@pytest.mark.parametrize(("text", "value"), [("90s", 90), ("30m", 1800), ("1.5h", 5400)])
def test_a_budget_is_a_time(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "h", "2", "2d", "-1h", "nanh", "infh", "1e30h"])
def test_what_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected a time"):
        seconds(text)


@pytest.mark.parametrize("text", ["6,6", "3,9", "6,a", "6,", "6,1000000", "-6,9"])
def test_what_are_no_rungs_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected rising"):
        _rungs(text)
    assert _rungs("6, 18") == (6, 18)


def test_a_tuning_says_how_it_stands(invoke: Callable[..., Any], folder: Path) -> None:
    result = invoke("status", str(folder))
    assert result.exit_code == 0
    assert "Faster than the default in 2 of 2 cases" in result.output
    assert "short/fp32: BLOCK=3 1.06" in result.output
    document = json.loads(invoke("status", str(folder), "--json").stdout)
    assert document["finished"]
    assert {winner["arm"] for winner in document["winners"]} == {"BLOCK=3"}
    assert invoke("report", str(folder)).exit_code == 0
    assert "<svg" in (folder / "report.html").read_text()
    assert "is finished: there is nothing to stop" in " ".join(invoke("stop", str(folder)).output.split())
    assert not (folder / STOP).exists()


def test_a_tuning_that_is_not_finished_is_asked_to_stop(invoke: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "t of mine"
    alone = "nobody on this machine works on it"
    with TuningJournal(folder, setup()):
        said = " ".join(invoke("stop", str(folder)).output.split())
        assert said == f"the tuning in {folder} ends after the block that is being measured"
        assert alone not in invoke("status", str(folder)).output
    (folder / STOP).unlink()
    said = " ".join(invoke("stop", str(folder)).output.split())
    assert said == (
        f"no process on this machine works on {folder}; one on another machine ends after the block that it measures"
    )
    assert (folder / STOP).exists(), "another machine may work on it"
    said = " ".join(invoke("status", str(folder)).output.split())
    assert f"{alone}; `cudadent42 tune resume '{folder}'` goes on" in said


def test_a_macro_that_no_source_names_is_told(invoke: Callable[..., Any], tmp_path: Path) -> None:
    create("k", Kind.CPU, tmp_path)
    with (tmp_path / "k/k.cpp").open("a") as source:
        source.write("\n#ifndef TILE\n#define TILE 8\n#endif\n")
    words = (
        "k.toml",
        "--suite",
        "small",
        "--case",
        "tiny",
        "--dtype",
        "fp32",
        "--dry-run",
        "--device",
        "cpu",
    )
    for macro, told in (("TILES", True), ("TILE", False)):
        (tmp_path / "k.toml").write_text(
            SPACE.replace("cudadent42[portable]", "k/k.toml").replace("block_n", macro)
        )
        said = " ".join(invoke(*words).output.split())
        assert ("names TILES (did you mean 'TILE'?); if no other header does" in said) is told


def test_tables_are_looked_through(
    invoke: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashmoe_science.tuned.lookup.PACKAGE_FOLDER", tmp_path / "package")
    assert "no table of tuned configurations is installed" in invoke("check").output
    tables = tmp_path / "config/flashmoe_science/tuned"
    tables.mkdir(parents=True)
    (tables / "bad.toml").write_text("schema_version = 9")
    said = " ".join(invoke("check").output.split())
    assert said.startswith("not used: ")
    assert said.endswith("reads 1")


def test_entries_are_used_where_their_device_is_and_tables_are_asked(
    invoke: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = "attention.portable"
    tuned = definition("attention").tuned()
    assert tuned is not None
    entry = TableEntry(
        kernel=kernel,
        digest=tuned.digest(kernel),
        device=cpu_name(),
        multiprocessors=0,
        region=Region({"dtype": "bf16"}, {}),
        settings={"block_n": 48},
        ratio=1.05,
        low=1.04,
        high=1.06,
        evidence=("t/confirmed/one-1",),
    )
    tables = tmp_path / "config/flashmoe_science/tuned"
    tables.mkdir(parents=True)
    others = [replace(entry, device="NVIDIA H200", multiprocessors=132), replace(entry, digest="0" * 64)]
    (tables / "here.toml").write_text(table_text([entry, *others]))

    def problems() -> list[str]:
        rows = json.loads(invoke("check", "--json").output)["entries"]
        return [row["problem"] for row in rows if row["table"] == str(tables / "here.toml")]

    used, *unused = problems()
    assert used == ""
    assert unused == [
        "this machine has another device",
        "tuned for other sources of the kernel; tune it again",
    ]
    monkeypatch.setenv("FLASHMOE_TUNED", "off")
    assert problems() == ["FLASHMOE_TUNED=off asks no table"] * 3


def test_max_cost_needs_a_rate(
    invoke: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so before it looks at the machine."""
    from cudadent42.tune import opening

    monkeypatch.setattr(opening, "reopen", None)
    monkeypatch.setattr(opening, "open_tuning", None)
    for words in (("resume", str(folder)), ("s.toml",)):
        result = invoke(*words, "--max-cost", "5")
        assert result.exit_code == 2
        assert "name its rate with --rate" in " ".join(result.output.split())
