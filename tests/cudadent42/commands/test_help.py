"""What a reader of ``--help`` and of an error sees, word by word; ``./test.sh --update-snapshots`` writes it again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import made_command_line
from cudadent42.commands import completion
from cudadent42.commands.help import KEPT, OUTPUT

ROOT = Path(__file__).resolve().parents[3]
Snapshot = Callable[[str, str], None]


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and group with its name."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, (*path, name))


COMMANDS = dict(walk(made_command_line.group()))


def help_of(path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, columns: int = 100) -> str:
    """As on a terminal that wide."""
    monkeypatch.setenv("COLUMNS", str(columns))
    command = COMMANDS[()]
    context = command.context_class(command, info_name="cudadent42", **command.context_settings)
    for number, name in enumerate(path, 1):
        command = COMMANDS[path[:number]]
        settings = command.context_settings
        context = command.context_class(command, info_name=name, parent=context, **settings)
    return f"{context.get_help()}\n"


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A command in an empty folder, without ledger, remotes and rates."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDADENT42_LEDGER", "none")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("CUDADENT42_RATE", raising=False)
    return lambda *words: made_command_line.invoke(*words, prog_name="cudadent42")


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: " ".join(path) or "cudadent42")
def test_help(path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot) -> None:
    snapshot(f"help/{'-'.join(path) or 'cudadent42'}", help_of(path, monkeypatch))


VERBLESS = r"(An?|Blocks|Further|How|Only|Paired|The|What|Where|Which|Whose|Why)\b"
"""What a text begins with that names a thing, and does not say what to do with it."""


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: " ".join(path) or "cudadent42")
def test_every_option_is_explained_in_one_style(path: tuple[str, ...]) -> None:
    for parameter in COMMANDS[path].params:
        explanation = getattr(parameter, "help", None) or ""
        assert re.match(r"[A-Z$]|auto|call|cpu|fp16|python|ssh:|path/", explanation), parameter.name
        assert explanation.endswith((".", "`.")), (parameter.name, explanation)
        assert not re.match(VERBLESS, explanation), (parameter.name, explanation)
        assert max(len(sentence.split()) for sentence in explanation.split(". ")) <= 40
        if not getattr(parameter, "is_flag", False):
            placeholder = parameter.metavar or ""
            names = placeholder.split("|")
            assert all(re.fullmatch(r"[A-Z_]+|-|\w+://[A-Z]+|[a-z]+", name) for name in names), parameter.name


def test_options_of_run_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = help_of(("run",), monkeypatch).splitlines()
    titles = [line[:-1] for line in lines if line and not line.startswith((" ", "Usage"))]
    assert titles == ["What is measured", "How it is measured", "Where it runs", KEPT, OUTPUT]


def test_help_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = [
        max(map(len, help_of(("run",), monkeypatch, columns).splitlines())) for columns in (60, 100, 200)
    ]
    assert widths[0] <= 60 < widths[1] <= 100 < widths[2] <= 200


def test_the_option_is_called_the_same_everywhere() -> None:
    """``--implementations`` still works, for the commands that run folders hold."""
    for path, command in COMMANDS.items():
        for parameter in command.params:
            long = [name for name in parameter.opts if name.startswith("--")]
            assert long[:1] != ["--implementations"], path
    assert "--implementations" in {name for each in COMMANDS["run",].params for name in each.opts}
    devices = [p for command in COMMANDS.values() for p in command.params if "--device" in p.opts]
    assert {parameter.default for parameter in devices} == {"auto"}


def test_the_shell_completes_commands_options_and_suites() -> None:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "src"),
        "_CUDADENT42_COMPLETE": "complete_bash",
        "COMP_CWORD": "3",
        "COMP_WORDS": "cudadent42 run --suite ho",
    }
    done = subprocess.run(
        [sys.executable, "-m", "cudadent42"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["hopper"], done.stderr


def test_completion_knows_what_there_is() -> None:
    assert "default" in completion.suites("d")
    assert completion.gates("imp") == ["improvement"]
    assert completion.devices("c") == ["cpu", "cuda"]
    assert completion.dtypes("b") == ["bf16"]
    assert completion.remotes("") == []


ERRORS: dict[str, tuple[str, ...]] = {
    "unknown-suite": ("run", "--suite", "hoper"),
    "suite-file-missing": ("run", "--suite", "./none.toml"),
    "suite-unknown-key": ("run", "--suite", "./bad.toml"),
    "unknown-case": ("run", "--case", "tinny"),
    "unknown-dtype": ("run", "--dtype", "fp8"),
    "unknown-implementation": ("verify", "--implementation", "pytorhc"),
    "plug-in-missing": ("verify", "--implementation", "./my.py:attention"),
    "unknown-device": ("run", "--device", "tpu"),
    "bad-precision": ("run", "--precision", "half"),
    "bad-repeats": ("run", "--repeats", "0"),
    "unknown-gate": ("run", "--gate", "improvment"),
    "cost-without-machine": ("run", "--max-cost", "5"),
    "output-not-empty": ("run", "--suite", "small", "--output-dir", "full"),
    "no-run-folder": ("report", "full"),
    "gate-no-run-folder": ("gate", "full"),
    "doctor-no-run-folder": ("doctor", "none"),
    "unknown-remote": ("run", "--on", "gpu"),
    "remote-without-address": ("remote", "add", "gpu"),
    "remote-bad-address": ("remote", "add", "gpu", "ftp://host"),
    "remote-bad-zone": ("remote", "add", "gpu", "gce://my-project/z/gpu-1"),
    "remote-unknown-rate": (
        *("remote", "add", "gpu", "gce://my-project/us-central1-a/gpu-1"),
        *("--rate", "none"),
    ),
    "ledger-off": ("ledger", "list"),
    "unknown-lesson": ("patterns", "show", "out-of-mem"),
    "unknown-rate": ("cost", "advise", "--idle", "45m", "--machine", "gcp-l5"),
    "bad-time": ("cost", "advise", "--idle", "soon"),
    "no-session": ("session", "status"),
    "compare-outside-of-git": ("compare", "main", "WORKTREE"),
    "new-bad-name": ("new", "../kernel"),
    "history-bad-output": ("history", "tiny", "--output", "plot.png"),
    "bench-bad-warmup": ("bench", "--warmup", "-1"),
    "build-unknown-arch": ("build", "--arch", "sm_1"),
    "build-no-kernels-for-it": ("build", "--device", "cuda", "--arch", "sm_70"),
    "run-unknown-engine": ("run", "--fleet", "foo"),
    "preflight-unknown-device": ("preflight", "--device", "tpu"),
    "implementations-unknown-device": ("implementations", "--device", "tpu"),
    "profile-unknown-case": ("profile", "tinny", "--device", "cpu"),
    "bisect-outside-of-git": ("bisect", "--good", "v0.1.0", "--bad", "HEAD"),
    "capture-no-script": ("capture", "none.py"),
    "tune-no-space": ("tune", "run", "none.toml"),
    "tune-no-folder": ("tune", "status", "none"),
    "fleet-no-folder": ("fleet", "work", "none"),
    "schemas-unknown": ("schemas", "manifst"),
    "mcp-no-project": ("mcp", "--project", "none"),
    "session-bad-name": ("session", "start", "../mine"),
    "session-unknown-protocol": ("session", "start", "--protocol", "defualt"),
    "session-no-such-folder": ("session", "status", "--session", "./none"),
    "untrusted-accept-alone": ("run", "--accept-missing", "files"),
    "untrusted-profile": ("profile", "tiny", "--untrusted"),
    "untrusted-tune": ("tune", "run", "space.toml", "--untrusted"),
}

NEVER_WRONG = {"suites", "cache"}
"""Commands that ask for nothing."""


def test_every_command_has_an_error_of_its_own() -> None:
    commands = {path[0] for path in COMMANDS if path}
    assert commands - {words[0] for words in ERRORS.values()} == NEVER_WRONG


@pytest.mark.parametrize("name", ERRORS)
def test_error(name: str, invoke: Callable[..., Any], snapshot: Snapshot, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "bad.toml").write_text('name = "bad"\ncolour = "red"\n')
    done = invoke(*ERRORS[name])
    told = done.stderr.replace(str(tmp_path.resolve()), "<folder>").replace(str(ROOT), "<checkout>")
    # What there is grows, and git words its own.
    told = re.sub(r"(expected one of) .*?(?=, or the path|, path/|\. | \(did|\n)", r"\1 <names>", told)
    told = re.sub(r"(the suite \w+ has) .*?(?= \(did|\n)", r"\1 <names>", told)
    told = re.sub(r"\(fatal: .*?\); ", "(<git>); ", told)
    assert done.exit_code != 0
    assert done.stdout == ""
    assert "Traceback" not in told
    snapshot(f"errors/{name}", f"$ cudadent42 {' '.join(ERRORS[name])}\n{told}exit code {done.exit_code}\n")
