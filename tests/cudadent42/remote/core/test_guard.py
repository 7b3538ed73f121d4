"""Installing the watchdog over a real sshd, asking it, and taking it away; and who keeps it alive."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import pytest
from sshd import Server, spend_budget

from cudadent42.base.errors import LabError, UsageError
from cudadent42.cost import rates
from cudadent42.remote.core import job as jobs
from cudadent42.remote.core import watchdog
from cudadent42.remote.core.address import parse
from cudadent42.remote.core.hosts import Remote, get, save
from cudadent42.remote.core.job import BusyError, JobState, Workspace
from cudadent42.remote.core.protection import ANY_TERMS, Limit, Terms, protect, release
from cudadent42.remote.core.run import workspace_of
from cudadent42.remote.core.scripts import script
from cudadent42.remote.core.ssh import Connection, Done, call, connect
from cudadent42.remote.core.watchdog import Action, Keeper, Limits, Reason

ROOT = Path(__file__).resolve().parents[4]
NEVER = 10_000_000
BESIDE = ".local/state/cudadent42/watchdog"
PYTHON = """#!/bin/sh
mkdir -p "$5"
sleep "${PAUSE:-0}"
"""


@pytest.fixture
def workspace(server: Server, tmp_path: Path) -> Iterator[Workspace]:
    address = parse(server.address)
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    there = Workspace(connect(address), Remote("there", address, "a $(touch bad) folder", str(python)))
    (server.folder / "home/a $(touch bad) folder/tree").mkdir(parents=True)
    yield there
    watchdog.remove(there)
    assert not (server.folder / "home" / BESIDE).exists()
    assert not (server.folder / "home/bad").exists()


def limits(server: Server, **given: int) -> Limits:
    action = server.folder / "act ion"
    action.write_text(f'#!/bin/sh\necho "$1" >>"{server.folder}/done"\n')
    action.chmod(0o755)
    return Limits(action=str(action), tick_s=1, terminals=str(server.folder), **given)


def pid(server: Server) -> int:
    return int((server.folder / "home" / BESIDE / "pid").read_text().split()[0])


def until_acted(workspace: Workspace) -> watchdog.Watch:
    """However long that takes on a busy machine; the time limit of a test ends it."""
    while True:
        watch = watchdog.report(workspace)
        if watch is not None and watch.acted is not None:
            return watch
        time.sleep(0.1)


def test_installed_once_and_changed_in_place(server: Server, workspace: Workspace) -> None:
    assert watchdog.report(workspace) is None
    assert watchdog.arm(workspace, limits(server, idle_s=NEVER), Keeper.PROCESS) is Keeper.PROCESS
    first = pid(server)
    assert (
        watchdog.arm(workspace, limits(server, idle_s=NEVER, budget_s=NEVER), Keeper.PROCESS)
        is Keeper.PROCESS
    )
    assert pid(server) == first
    watch = watchdog.report(workspace)
    assert watch is not None
    assert (watch.watches, watch.keeper, watch.acted) == (True, Keeper.PROCESS, None)
    assert (watch.idle_s, watch.budget_s) == (NEVER, NEVER)
    assert watch.line().startswith("the watchdog powers the machine off when it is idle for ")


def test_another_version_takes_the_place_of_the_one_that_is_there(
    server: Server, workspace: Workspace
) -> None:
    watchdog.arm(workspace, limits(server), Keeper.PROCESS)
    first = pid(server)
    with (server.folder / "home" / BESIDE / "watchdog.sh").open("a") as file:
        file.write("# older\n")
    watchdog.arm(workspace, limits(server), Keeper.PROCESS)
    assert pid(server) != first
    assert "# older" not in (server.folder / "home" / BESIDE / "watchdog.sh").read_text()


def test_one_that_does_not_arrive_whole_takes_the_place_of_none(
    server: Server, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that is cut is the end of the file for who reads it there."""
    watchdog.arm(workspace, limits(server, idle_s=NEVER), Keeper.PROCESS)
    first = pid(server)

    def cut(connection: Connection, text: str, *arguments: str, data: IO[bytes]) -> Done:
        whole = data.read()
        return call(connection, text, *arguments, data=io.BytesIO(whole[: len(whole) // 2]))

    with monkeypatch.context() as patch:
        patch.setattr(watchdog, "call", cut)
        with pytest.raises(LabError, match="did not arrive whole"):
            watchdog.arm(workspace, limits(server, budget_s=NEVER), Keeper.PROCESS)
    watch = watchdog.report(workspace)
    assert watch is not None
    assert (pid(server), watch.watches, watch.idle_s, watch.budget_s) == (first, True, NEVER, 0)


def test_it_acts_after_every_connection_is_gone(server: Server, workspace: Workspace) -> None:
    watchdog.arm(workspace, limits(server, idle_s=2), Keeper.PROCESS)
    server.cut()
    workspace.connection.close()
    while not (server.folder / "done").exists():
        time.sleep(0.1)
    assert (server.folder / "done").read_text() == "idle\n"
    watch = until_acted(workspace)
    assert watch.acted is Reason.IDLE
    assert watch.line().startswith("the watchdog powered the machine off: idle for 0 min ")
    watchdog.arm(workspace, limits(server), Keeper.PROCESS)
    again = watchdog.report(workspace)
    assert again is not None
    assert again.acted is None


def test_the_budget_ends_a_job_and_its_exit_code_is_kept(
    server: Server, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = Path(workspace.remote.python)
    python.write_text(PYTHON.replace("#!/bin/sh", "#!/bin/sh\nPAUSE=1000"))
    watchdog.arm(workspace, limits(server, budget_s=NEVER), Keeper.PROCESS)
    jobs.start(workspace, "job-1", "cpu", ())
    spend_budget(server.folder / "home" / BESIDE)
    assert until_acted(workspace).acted is Reason.DEADLINE
    while (state := jobs.state(workspace, "job-1")).state is not JobState.DONE:
        time.sleep(0.1)
    assert state.exit_code == 128 + signal.SIGTERM


def test_the_limits_of_a_run_that_goes_on_are_not_changed(server: Server, workspace: Workspace) -> None:
    Path(workspace.remote.python).write_text(PYTHON.replace("#!/bin/sh", "#!/bin/sh\nPAUSE=1000"))
    watchdog.arm(workspace, limits(server, budget_s=NEVER), Keeper.PROCESS)
    jobs.start(workspace, "job-1", "cpu", ())
    with pytest.raises(BusyError, match="busy with job-1"):
        watchdog.arm(workspace, limits(server, budget_s=1), Keeper.PROCESS)
    other = Workspace(workspace.connection, Remote("other", workspace.remote.address, "another folder"))
    with pytest.raises(BusyError, match="busy with job-1"):
        watchdog.arm(other, limits(server, budget_s=1), Keeper.PROCESS)
    jobs.stop(workspace, "job-1")


def test_after_a_run_it_is_disarmed_and_stays(server: Server, workspace: Workspace) -> None:
    watchdog.disarm(workspace)  # there is none yet
    Path(workspace.remote.python).write_text(PYTHON.replace("#!/bin/sh", "#!/bin/sh\nPAUSE=1000"))
    watchdog.arm(workspace, limits(server, budget_s=NEVER, idle_s=NEVER), Keeper.PROCESS)
    first = pid(server)
    jobs.start(workspace, "job-1", "cpu", ())
    watchdog.disarm(workspace)
    held = watchdog.report(workspace)
    assert held is not None
    assert held.budget_s == NEVER  # the limits of a run that goes on are not taken away
    jobs.stop(workspace, "job-1")
    watchdog.disarm(workspace)
    free = watchdog.report(workspace)
    assert free is not None
    assert (free.idle_s, free.budget_s, free.watches) == (0, 0, True)
    assert free.line() == "the watchdog has no limit to keep"
    assert pid(server) == first


def test_limits_hold_until_the_machine_is_off_and_not_after(server: Server, workspace: Workspace) -> None:
    watchdog.leave(workspace)  # there is none yet
    watchdog.arm(workspace, limits(server, idle_s=NEVER), Keeper.PROCESS)
    watchdog.leave(workspace)
    left = server.folder / "home" / BESIDE / "left"
    held = watchdog.report(workspace)
    assert held is not None
    assert held.idle_s == NEVER
    word, armed, _ = left.read_text().split()
    left.write_text(f"{word} {armed} another-boot\n")
    free = watchdog.report(workspace)
    assert free is not None
    assert free.line() == "the watchdog has no limit to keep"
    watchdog.arm(workspace, limits(server, idle_s=NEVER), Keeper.PROCESS)
    assert not left.exists()


def of_who_started_it(server: Server, workspace: Workspace, **given: int) -> Limits:
    """Limits that power it off, as after a stop that failed."""
    theirs = limits(server, **given)
    watchdog.arm(workspace, theirs, Keeper.PROCESS)
    watchdog.leave(workspace)
    return theirs


@pytest.mark.parametrize(
    ("budget_s", "wanted_s", "holds_s"), [(0, 600, 600), (NEVER, 600, 600), (500, 600, 500), (500, 0, 500)]
)
def test_a_machine_that_is_to_be_powered_off_stays_so(
    server: Server, workspace: Workspace, budget_s: int, wanted_s: int, holds_s: int
) -> None:
    """A run of somebody who did not start it has limits that only end that run."""
    begun = time.monotonic()
    theirs = of_who_started_it(server, workspace, idle_s=NEVER, budget_s=budget_s)
    watchdog.arm(workspace, Limits(budget_s=wanted_s, action=Action.END), Keeper.PROCESS)
    watchdog.disarm(workspace, Action.END)
    watch = watchdog.report(workspace)
    assert watch is not None
    assert (watch.action, watch.idle_s) == (theirs.action, NEVER)
    passed_s = math.ceil(time.monotonic() - begun) + 1  # the watchdog counts whole seconds
    assert holds_s - passed_s <= watch.budget_s <= holds_s
    # And not after it was off: its next start is somebody's.
    left = server.folder / "home" / BESIDE / "left"
    word, armed, _ = left.read_text().split()
    assert armed in (server.folder / "home" / BESIDE / "limits").read_text()
    left.write_text(f"{word} {armed} another-boot\n")
    free = watchdog.report(workspace)
    assert free is not None
    assert free.idle_s == 0
    watchdog.arm(workspace, Limits(budget_s=NEVER, action=Action.END), Keeper.PROCESS)
    own = watchdog.report(workspace)
    assert own is not None
    assert (own.action, own.budget_s) == ("end", NEVER)


def test_a_limit_that_powers_it_off_too_is_said_to(server: Server, workspace: Workspace) -> None:
    of_who_started_it(server, workspace, idle_s=1800)
    said: list[str] = []
    protect(workspace, None, Terms(Limit(5.0, rates.load().get("gcp-l4"))), said.append)
    assert said[-1].startswith(
        "there: the watchdog powers the machine off when it is idle for 30 min or when "
    )
    assert "an earlier run had it powered off" in said[-1]


def test_no_run_begins_on_a_machine_whose_limit_is_reached(server: Server, workspace: Workspace) -> None:
    of_who_started_it(server, workspace, budget_s=1000)
    state = server.folder / "home" / BESIDE / "state"
    armed, boot, at, _ = state.read_text().split()
    state.write_text(f"{armed} {boot} {at} 1000\n")
    with pytest.raises(LabError, match="the limit of an earlier run is reached"):
        watchdog.arm(workspace, Limits(budget_s=600, action=Action.END), Keeper.PROCESS)
    watch = watchdog.report(workspace)
    assert watch is not None
    assert watch.budget_s == 1000


def test_on_a_machine_at_hand_the_run_is_ended_and_not_the_machine(server: Server) -> None:
    save(Remote("mine", parse(server.address)))
    workspace = workspace_of(get("mine"))
    said: list[str] = []
    protect(workspace, None, Terms(Limit(5.0, rates.load().get("gcp-l4"))), said.append)
    watch = watchdog.report(workspace)
    assert watch is not None
    assert (watch.action, watch.idle_s) == ("end", 0)
    assert watch.budget_s == int(5.0 / 0.71 * 3600)
    assert said[0].startswith("mine: the watchdog ends the run when it has been on for")
    release(workspace, None, said.append)
    free = watchdog.report(workspace)
    assert free is not None
    assert free.budget_s == 0


def test_what_it_did_is_told_once(server: Server) -> None:
    save(Remote("mine", parse(server.address)))
    workspace = workspace_of(get("mine"))
    watchdog.arm(workspace, Limits(budget_s=1, tick_s=1, action=Action.END))
    assert until_acted(workspace).acted is Reason.DEADLINE
    said: list[str] = []
    protect(workspace, None, ANY_TERMS, said.append)
    assert len(said) == 1
    assert said[0].startswith("mine: the watchdog ended the run: its budget was spent: on for 0 min ")
    protect(workspace, None, ANY_TERMS, said.append)
    assert len(said) == 1


def test_the_commands(server: Server, workspace: Workspace, tmp_path: Path) -> None:
    def lab(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "cudadent42", "remote", *arguments],
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    save(workspace.remote)
    assert lab("status", "there") == "nothing runs there\n"
    watchdog.arm(workspace, limits(server, idle_s=1800), Keeper.PROCESS)
    told = "the watchdog powers the machine off when it is idle for 30 min"
    assert lab("status", "there").splitlines() == ["nothing runs there", told]
    assert json.loads(lab("status", "there", "--json"))["watchdog"]["idle_s"] == 1800
    assert "nothing but you ends the costs of there" in lab("unwatch", "there")
    assert watchdog.report(workspace) is None


def test_one_that_was_killed_is_said_to_be_gone(server: Server, workspace: Workspace) -> None:
    watchdog.arm(workspace, limits(server, idle_s=NEVER), Keeper.PROCESS)
    os.kill(pid(server), signal.SIGKILL)
    watch = watchdog.report(workspace)
    assert watch is not None
    assert not watch.watches
    assert "a new run starts it again" in watch.line()


@pytest.mark.parametrize("given", [{"idle_s": -1}, {"tick_s": 0}, {"terminals": "a\nb"}, {"action": "a\0"}])
def test_limits_that_make_no_sense(given: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="limits of a watchdog"):
        Limits(**given)


class Home:
    """guard.sh as it runs there, with stand-ins for the tools that keep a process alive."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tools = folder / "tools"
        self.tools.mkdir(parents=True)
        self.tool(
            "crontab",
            f'case $1 in -l) cat "{folder}/crontab" 2>/dev/null ;; -) cat >"{folder}/crontab.new" && '
            f'mv "{folder}/crontab.new" "{folder}/crontab" ;; esac\n',
        )

    def tool(self, name: str, text: str) -> None:
        (self.tools / name).write_text("#!/bin/sh\n" + text)
        (self.tools / name).chmod(0o755)

    def environment(self) -> dict[str, str]:
        return os.environ | {"HOME": str(self.folder), "PATH": f"{self.tools}:{os.environ['PATH']}"}

    def guard(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        text = "main() {\n" + script("guard.sh") + '\n}\nmain "$@"\n'
        return subprocess.run(
            ["sh", "-c", text, "sh", *arguments],
            input=script("watchdog.sh"),
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
        )

    def arm(self, keeper: str, action: str = "/bin/true") -> subprocess.CompletedProcess[str]:
        limits = ("0", str(NEVER), str(NEVER), "1", str(self.folder / "none"))
        size = len(script("watchdog.sh").encode())
        return self.guard("arm", "runs", *limits, action, keeper, str(size))

    def pid(self) -> int:
        return int((self.folder / BESIDE / "pid").read_text().split()[0])


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path / "a ho'me")
    yield made
    made.guard("remove")


def test_cron_starts_it_again(home: Home) -> None:
    theirs = "0 5 * * * backup\n"
    (home.folder / "crontab").write_text(theirs)
    for _ in range(2):
        done = home.arm("cron")
        assert (done.returncode, done.stdout) == (0, "cron\n"), done.stderr
    lines = (home.folder / "crontab").read_text().splitlines()
    assert lines[0] + "\n" == theirs
    assert [line.split(" sh ")[0] for line in lines[1:]] == ["@reboot", "*/5 * * * *"]
    first = home.pid()
    command = lines[1].removeprefix("@reboot ")
    # While it runs, cron's line starts none beside it.
    subprocess.run(["sh", "-c", command], env=home.environment(), check=True)
    assert home.pid() == first
    os.kill(first, signal.SIGKILL)
    started = subprocess.Popen(["sh", "-c", command], env=home.environment())
    try:
        while home.pid() == first:
            if started.poll() is not None:  # a child of the one that was killed still held the lock
                started = subprocess.Popen(["sh", "-c", command], env=home.environment())
            time.sleep(0.1)
        assert home.guard("remove").returncode == 0
        assert (home.folder / "crontab").read_text() == theirs
        assert not (home.folder / BESIDE).exists()
    finally:
        with suppress(ProcessLookupError):
            started.kill()
        started.wait()


def test_a_cron_that_refuses_is_said_not_to_keep_it(home: Home) -> None:
    home.tool("crontab", "exit 1\n")
    done = home.arm("cron")
    assert (done.returncode, done.stdout) == (0, "process\n")


def test_a_user_who_cannot_power_off_is_told_before_the_run(home: Home) -> None:
    home.tool("sudo", "exit 1\n")
    assert home.arm("process", "poweroff").returncode == 77
    assert not (home.folder / BESIDE / "limits").exists()


def test_the_reasons_are_words(workspace: Workspace) -> None:
    from cudadent42.remote.core.ssh import Done

    with pytest.raises(LabError, match="neither as root nor by `sudo -n`"):
        watchdog._output(workspace, Done(77, b"", ""))


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("needs systemd-analyze")
    text = script("guard.sh")
    function = text[text.index("unit() {") :].partition("\n}\n")[0] + "\n}\nunit"
    made = subprocess.run(["sh", "-c", function], capture_output=True, text=True, check=True).stdout
    assert "ExecStart=/bin/sh -c 'exec /bin/sh \"$$HOME/" in made
    unit = tmp_path / "cudadent42-watchdog.service"
    unit.write_text(made)
    done = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True, check=False)
    assert str(unit.name) not in done.stderr, done.stderr
