"""Which commands confine candidates to a sandbox, and that no other one runs anything where that is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import made_command_line
from cudadent42.base.errors import ExitCode, UsageError
from cudadent42.base.observer import Quiet
from cudadent42.commands.help import CONFINING, UNTRUSTED, WHY_NOT
from cudadent42.flows import profile
from cudadent42.plan import Choices, RunOptions


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with its name, groups left out."""
    inner = getattr(command, "commands", {})
    if not inner:
        yield path, command
    for name, each in inner.items():
        yield from leaves(each, (*path, name))


def test_the_commands_that_confine_are_those_that_are_named() -> None:
    taking = {
        " ".join(path)
        for path, command in leaves(made_command_line.group())
        if any(UNTRUSTED in parameter.opts for parameter in command.params)
    }
    assert taking == set(CONFINING)


@pytest.mark.parametrize(
    "words",
    [
        ("profile", "tiny", "--implementation", "theirs.py:attention"),
        ("doctor", "run"),
        ("tune", "run", "space.toml"),
        ("tune", "resume", "folder"),
        ("session", "start", "name"),
        ("session", "run"),
        ("session", "next"),
    ],
    ids=" ".join,
)
def test_whoever_asks_for_a_sandbox_elsewhere_is_refused_in_one_line(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.py").write_text("open('has-run', 'w')\n")
    done = made_command_line.invoke(*words, UNTRUSTED, prog_name="cudadent42")
    assert done.exit_code == ExitCode.USAGE
    (line,) = done.stderr.strip().splitlines()
    assert f"{words[0]}" in line
    assert f"confines nothing to a sandbox, so it takes no {UNTRUSTED} and has run nothing" in line
    assert f"has run nothing: {WHY_NOT[words[0]]};" in line
    assert "run, bench, build, verify, compare, bisect" in line
    assert [path.name for path in tmp_path.iterdir()] == ["theirs.py"]


def test_who_runs_nobodys_code_has_no_reason_to_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = made_command_line.invoke("report", "folder", UNTRUSTED, prog_name="cudadent42")
    assert f"it takes no {UNTRUSTED} and has run nothing; these do:" in done.stderr


def test_a_script_may_have_such_an_option_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = made_command_line.invoke("capture", "missing.py", UNTRUSTED, prog_name="cudadent42")
    assert "sandbox" not in done.stderr


def test_nothing_untrusted_is_profiled_by_another_way_either() -> None:
    options = RunOptions(choices=Choices(), device="cpu", untrusted=True)
    with pytest.raises(UsageError, match="a profiler cannot work in a sandbox"):
        profile.run(profile.ProfileOptions(run=options, implementation="cudadent42"), Quiet())
