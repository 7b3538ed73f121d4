"""Groups of options: Typer sees single ones, the command gets frozen objects."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

import made_command_line
from cudadent42.commands.grouped import grouped
from cudadent42.flows import pipeline, race
from cudadent42.model.records import CacheState
from cudadent42.plan import Choices, RunOptions


@dataclass(frozen=True)
class Size:
    width: Annotated[int, typer.Option("--width")]
    height: Annotated[int, typer.Option("--height")] = 2


@dataclass(frozen=True)
class Colours:
    names: Annotated[list[str] | None, typer.Option("--colour")] = None


def called(*words: str) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []

    @grouped
    def draw(
        *, what: Annotated[str, typer.Argument()], size: Size, bold: bool = False, colours: Colours
    ) -> None:
        calls.append((what, size, bold, colours))

    app = typer.Typer()
    app.command()(draw)
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == (0 if calls else 2), result.output
    return calls


def test_values_and_defaults_arrive_in_their_groups() -> None:
    assert called("box", "--width", "3") == [("box", Size(3, 2), False, Colours(None))]
    words = ("box", "--colour=red", "--width=1", "--height=4", "--bold", "--colour=blue")
    assert called(*words) == [("box", Size(1, 4), True, Colours(["red", "blue"]))]


def test_a_field_without_default_is_a_required_option() -> None:
    assert called("box", "--height", "3") == []


def test_two_groups_cannot_have_an_option_of_one_name() -> None:
    def twice(first: Size, second: Size) -> None: ...

    with pytest.raises(ValueError, match="duplicate parameter name"):
        grouped(twice)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the flows are given in place of being carried out."""
    given: list[Any] = []

    def keep(*arguments: Any, execute: object = None) -> None:
        given.extend(each for each in arguments if isinstance(each, RunOptions | race.RaceOptions))
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "run", keep)
    monkeypatch.setattr(race, "race", keep)
    monkeypatch.setattr("cudadent42.flows.race.bisect.bisect", keep)
    return given


HOW = ("--repeats=7", "--seed=3", "--precision=0.5 %", "--budget=9", "--l2=cold", "--case=a,b", "--case=c")
CHOICES = Choices(
    suite="small",
    cases=("a", "b", "c"),
    repeats=7,
    seed=3,
    precision=0.005,
    budget_s=9.0,
    cache=CacheState.COLD,
)


@pytest.mark.parametrize("command", ["run", "bench", "compare", "bisect"])
def test_commands_ask_for_the_same_by_the_same_options(
    command: str, asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [command, "--suite=small", *HOW, "--device=cpu", "--gate=default", "--ignore-preflight"]
    words += {"compare": ["A", "B"], "bisect": ["--good=A", "--bad=B"]}.get(command, [])
    monkeypatch.setattr("sys.argv", ["cudadent42", *words])
    made_command_line.invoke(*words, f"--output-dir={tmp_path}")
    (options,) = asked
    run = options if isinstance(options, RunOptions) else options.run
    assert run.choices == CHOICES
    assert (run.device, run.output, run.ignore_preflight, run.save_samples) == ("cpu", tmp_path, True, True)
    assert run.gate is not None
    assert run.with_report is (command != "bench")
    assert run.command == ("cudadent42", *words)
    with pytest.raises(FrozenInstanceError):
        run.device = "cuda"  # type: ignore[misc]
