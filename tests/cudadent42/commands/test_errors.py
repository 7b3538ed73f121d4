"""How commands end that fail: one line without control characters, an exit code of its own kind, one JSON document."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202e"


def cli(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cudadent42", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )


def assert_clean(done: subprocess.CompletedProcess[str]) -> None:
    assert not [c for c in done.stdout + done.stderr if c not in "\n\t" and not c.isprintable()]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("gate", ".", "--gate", f"{HOSTILE}.toml"),
        ("report", f"missing{HOSTILE}"),
        ("suites", f"--{HOSTILE}"),
        (f"x{HOSTILE}",),
        ("run", "--suite", f"no{HOSTILE}"),
        ("run", "--implementations", f"{HOSTILE}.py:x"),
        ("session", "start", f"{HOSTILE}"),
        ("history", HOSTILE),
        ("patterns", "show", HOSTILE),
        ("remote", "add", HOSTILE, HOSTILE),
    ],
)
def test_arguments_are_shown_without_what_a_terminal_obeys(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    done = cli(*arguments, cwd=tmp_path, CUDADENT42_LEDGER=str(tmp_path / "ledger.sqlite"))
    assert done.returncode == 2
    assert_clean(done)


def test_a_long_argument_makes_no_long_message(tmp_path: Path) -> None:
    done = cli("run", "--suite", "x" * 20_000, cwd=tmp_path)
    assert max(map(len, done.stderr.splitlines())) <= 2000
    done = cli("run", "--repeats", "x" * 20_000, cwd=tmp_path)
    assert len(done.stderr) <= 2000


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("report", "missing", "--json"), 2),
        (("suites", "--json", "--unknown"), 2),
        (("nonsense", "--json"), 2),
        (("run", "--suite", "nope", "--json"), 2),
        (("gate", "missing", "--json"), 2),
    ],
)
def test_with_json_an_error_is_a_document_too(tmp_path: Path, arguments: tuple[str, ...], code: int) -> None:
    done = cli(*arguments, cwd=tmp_path)
    assert done.returncode == code
    error = json.loads(done.stdout)["error"]
    assert error["exit_code"] == code
    assert error["message"]


def test_a_defect_is_one_line_and_no_failed_gate(tmp_path: Path) -> None:
    """A module of the program that fails in a way that nobody has thought of."""
    script = (
        "import sys\n"
        "from cudadent42.commands import cli\n"
        "from cudadent42.stages import gates\n"
        "def broken(*a, **k): raise ZeroDivisionError(chr(27) + '[2J' + 'x' * 5000)\n"
        "gates.load = broken\n"
        "sys.argv = ['cudadent42', *sys.argv[1:]]\n"
        "sys.exit(cli.main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, "gate", ".", "--gate", "default"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 70
    assert_clean(done)
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "ZeroDivisionError" in line
    assert len(line) <= 2010
    debugged = subprocess.run(
        [*command, "--debug"], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert debugged.returncode == 70
    assert "Traceback" in debugged.stderr


def test_debug_keeps_the_exit_code(tmp_path: Path) -> None:
    done = cli("report", "missing", "--debug", cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" in done.stderr


def test_a_suite_that_is_near_to_none_is_not_guessed(tmp_path: Path) -> None:
    assert "did you mean" not in cli("run", "--suite", "nope", cwd=tmp_path).stderr
    assert "did you mean 'default'?" in cli("run", "--suite", "defualt", cwd=tmp_path).stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("cost", "--ledger", "~nouser42/x"),
        ("ledger", "check", "--ledger", "~nouser42/x"),
        ("ledger", "rebuild", "--ledger", "~nouser42/x"),
        ("history", "one", "--ledger", "~nouser42/x"),
        ("compare", "~nouser42/a", "~nouser42/b"),
        ("verify", "--implementations", "~nouser42/x.py:f"),
        ("build", "--implementations", "~nouser42/x.toml"),
        ("report", "~nouser42/x"),
    ],
)
def test_the_home_of_nobody(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = cli(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert_clean(done)


def test_the_ledger_of_nobody_in_the_environment(tmp_path: Path) -> None:
    done = cli("cost", "--json", cwd=tmp_path, CUDADENT42_LEDGER="~nouser42/x")
    assert done.returncode == 2
    assert_clean(done)
    assert "write the whole path" in done.stderr


@pytest.mark.parametrize("group", ["session", "remote", "patterns"])
def test_a_group_alone_shows_its_help(tmp_path: Path, group: str) -> None:
    done = cli(group, cwd=tmp_path)
    assert f"Usage: cudadent42 {group}" in done.stdout + done.stderr
    assert "Error" not in done.stderr


@pytest.mark.parametrize("group", ["cost"])
def test_a_group_that_does_something_alone_does_it(tmp_path: Path, group: str) -> None:
    done = cli(group, cwd=tmp_path, CUDADENT42_LEDGER=str(tmp_path / "ledger.sqlite"))
    assert "Usage" not in done.stdout + done.stderr
    assert "no ledger" in done.stdout + done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("ledger", "rebuild", "."),
        ("remote", "list"),
        ("cost", "rates"),
        ("patterns", "list"),
        ("tune", "check"),
        ("run", "--untrusted", "--implementations", "./none.py:f"),
    ],
)
@pytest.mark.usefixtures("fresh_processes")
def test_without_a_home_nothing_is_read_or_made_below_the_working_directory(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """No HOME, and a user whom the table of users lacks. A folder called ``~`` there may be anybody's."""
    program = (
        "import pwd, sys\n"
        "def nobody(user): raise KeyError(user)\n"
        "pwd.getpwuid = nobody\n"
        "from cudadent42.commands.cli import main\n"
        "sys.exit(main())\n"
    )
    working, temporary = tmp_path / "working", tmp_path / "tmp"
    planted = working / "~/.config/cudadent42"
    planted.mkdir(parents=True)
    (working / "~/.config/flashmoe_science/tuned").mkdir(parents=True)
    for path in ("cudadent42/remotes.toml", "cudadent42/rates.toml", "flashmoe_science/tuned/planted.toml"):
        (working / "~/.config" / path).write_text("planted = ")
    temporary.mkdir()
    before = sorted(working.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=working,
        env={
            "TMPDIR": str(temporary),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join(sys.path),
            "FLASHMOE_CACHE_DIR": str(tmp_path / "cache"),
        },
        capture_output=True,
        text=True,
    )
    assert_clean(done)
    assert done.returncode == (2 if "run" in arguments else 0), done.stderr
    assert "planted" not in done.stdout + done.stderr
    assert sorted(working.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--timer", "gpu"), "'gpu' is not one of 'call', 'cpu', 'graph', 'queue'"),
        (("--seed", "x"), "whole number"),
        (("--budget", "soon"), "number"),
    ],
)
def test_an_option_s_value_is_refused_in_words_of_the_lab(
    words: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    """The library that checks values calls them inputs that it is unable to parse, and says that it is an error."""
    done = cli("run", *words, cwd=tmp_path, COLUMNS="200")
    assert done.returncode == 2
    assert words[0] in done.stderr
    assert told in done.stderr
    assert "Value error" not in done.stderr
    assert "parse string" not in done.stderr
