"""The watchdog as a real process: what it takes for idle, when its budget ends, and what it survives.

Its seconds are the test's: what it reads for /proc/uptime is a file, and its ``sleep`` adds to that what it was asked
for. So a look follows on the last one at once. One test has the kernel's clock and coreutils' ``sleep``.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cudadent42.remote.core.scripts import script

BOOT = Path("/proc/sys/kernel/random/boot_id")
NEVER = 10_000_000
"""Seconds."""

SLEEP = """case $1 in *.*) exec '{sleep}' "$1" ;; esac
[ ! -e '{done}' ] || exec '{sleep}' 1000
read -r now rest <'{clock}'
now=$((${{now%%.*}} + ${{1%%.*}}))
echo "$now.00 0.00" >'{clock}.new' && '{mv}' '{clock}.new' '{clock}'
exec '{sleep}' 0.01
"""
"""A part of a second is what a job is given to end in. Once it has acted time stands still, so that it does not act
again before the test has looked."""

ACTION = """#!/bin/sh
echo "$*" >>"$(dirname "$0")/done"
"""


def until(happens: Callable[[], bool]) -> None:
    """Waits for as long as it takes."""
    while not happens():
        time.sleep(0.01)


def program(name: str) -> str:
    path = shutil.which(name)
    assert path is not None, name
    return path


def end(job: subprocess.Popen[bytes]) -> None:
    """With all that it started. One that was waited for may have given its number to another."""
    if job.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


@dataclass
class Machine:
    """A watchdog in a folder of its own, with a home of runs and stand-ins for the tools that it asks."""

    home: Path
    process: subprocess.Popen[bytes] | None = None
    jobs: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def clock(self) -> Path:
        return self.home / "uptime"

    def uptime(self) -> int:
        return int(float(self.clock.read_text().split()[0]))

    def by_its_own_clock(self) -> None:
        self.clock.write_text("1000.00 0.00\n")
        text = script("watchdog.sh")
        assert text.count("</proc/uptime") == 1
        (self.guard / "watchdog.sh").write_text(text.replace("</proc/uptime", f"<'{self.clock}'"))
        programs = {name: program(name) for name in ("mv", "sleep")}
        self.tool("sleep", SLEEP.format(clock=self.clock, done=self.home / "done", **programs))

    def by_the_kernels_clock(self) -> None:
        (self.guard / "watchdog.sh").write_text(script("watchdog.sh"))
        (self.home / "tools" / "sleep").unlink()

    @property
    def guard(self) -> Path:
        return self.home / "watch dog"

    @property
    def runs(self) -> Path:
        return self.home / " runs of $(touch bad)"

    def tool(self, name: str, text: str) -> None:
        path = self.home / "tools" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/sh\n" + text)
        path.chmod(0o755)

    def limits(
        self, idle: int = 0, budget: int = 0, quiet: int = NEVER, armed: str = "once", action: str = ""
    ) -> None:
        new = self.guard / "limits.test"
        action = action or str(self.home / "act ion")
        new.write_text(f"{idle} {budget} {quiet} 1 {armed}\n{self.home}/terminals\n{action}\n")
        new.replace(self.guard / "limits")

    def watch(self, **variables: str) -> None:
        environment = os.environ | {"PATH": f"{self.home}/tools:{os.environ['PATH']}"} | variables
        self.process = subprocess.Popen(
            ["/bin/sh", str(self.guard / "watchdog.sh")], env=environment, cwd="/", start_new_session=True
        )
        until(self.state_is_kept)

    def state_is_kept(self) -> bool:
        state = self.guard / "state"
        if not state.exists():
            return False
        armed, boot, *_ = state.read_text().split()
        return armed in (self.guard / "limits").read_text() and boot == BOOT.read_text().strip()

    def run(self, name: str = "job-1", command: str = "sleep 1000") -> None:
        """A job as job.sh leaves it: leader of its process group, on record by number and start time."""
        folder = self.runs / "jobs" / name
        folder.mkdir(parents=True)
        job = subprocess.Popen(["sh", "-c", command], start_new_session=True, cwd=folder)
        self.jobs.append(job)
        stat = Path(f"/proc/{job.pid}/stat").read_text().rpartition(") ")[2].split()
        (folder / "pid").write_text(f"{job.pid} {stat[19]}\n")
        (folder / "log").write_text("")

    def end_job(self) -> None:
        end(self.jobs[-1])

    def done(self) -> list[str]:
        path = self.home / "done"
        return path.read_text().splitlines() if path.exists() else []

    def acted(self) -> list[str]:
        path = self.guard / "acted"
        return path.read_text().splitlines() if path.exists() else []

    def rounds(self, count: int) -> None:
        """Wait until the watchdog has looked so often again: its clock went on by as many ticks."""
        end = self.uptime() + count
        until(lambda: self.uptime() > end)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    made.guard.mkdir()
    made.runs.mkdir()
    (made.guard / "folders").write_text(f"{made.runs}\n")
    made.by_its_own_clock()
    (tmp_path / "act ion").write_text(ACTION)
    (tmp_path / "act ion").chmod(0o755)
    made.tool("nvidia-smi", "exit 9\n")
    yield made
    (made.guard / "limits").unlink(missing_ok=True)
    if made.process is not None:
        end(made.process)
    for job in made.jobs:
        end(job)
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize("kernels", [False, True], ids=["the test's clock", "the kernel's clock"])
def test_an_idle_machine_is_ended(machine: Machine, kernels: bool) -> None:
    if kernels:
        machine.by_the_kernels_clock()
    machine.limits(idle=2)
    machine.watch()
    until(lambda: machine.done() != [])
    assert machine.done() == ["idle first"]
    assert machine.acted()[0] == f"idle once {BOOT.read_text().strip()}"
    assert machine.acted()[1].startswith("idle for 0 min ")


def test_a_run_is_never_idle_however_long_it_says_nothing(machine: Machine) -> None:
    machine.limits(idle=1, budget=NEVER)
    machine.run()
    machine.watch()
    machine.rounds(4)
    assert machine.done() == []
    machine.end_job()
    until(lambda: machine.done() == ["idle first"])


def test_a_number_that_another_process_has_now_is_no_run(machine: Machine) -> None:
    machine.run()
    machine.limits(idle=1)
    (machine.runs / "jobs/job-1/pid").write_text(f"{machine.jobs[-1].pid} 1\n")
    machine.watch()
    until(lambda: machine.done() == ["idle first"])


def test_a_folder_that_is_being_fetched_is_busy(machine: Machine) -> None:
    machine.run("fetches")
    (machine.runs / "jobs/fetches/pid").rename(machine.runs / "fetching")
    machine.limits(idle=1)
    machine.watch()
    machine.rounds(4)
    assert machine.done() == []


def test_the_budget_ends_a_run_that_keeps_what_it_has(machine: Machine) -> None:
    machine.run(command='trap "echo kept >samples; exit 143" TERM; while :; do sleep 0.1; done')
    machine.limits(budget=2)
    machine.watch()
    until(lambda: machine.done() == ["deadline first"])
    assert (machine.runs / "jobs/job-1/samples").read_text() == "kept\n"
    assert machine.jobs[-1].wait() == 143
    assert machine.acted()[1].startswith("its budget was spent: on for 0 min ")


def test_a_run_within_its_budget_goes_on(machine: Machine) -> None:
    machine.run()
    machine.limits(idle=1, budget=NEVER)
    machine.watch()
    machine.rounds(5)
    assert machine.done() == []
    assert machine.jobs[-1].poll() is None


def test_new_limits_take_the_place_of_the_old_ones(machine: Machine) -> None:
    machine.run()
    (machine.guard / "state").write_text(f"once {BOOT.read_text().strip()} {machine.uptime()} 100000\n")
    machine.limits(budget=NEVER)
    machine.watch()
    machine.limits(budget=NEVER - 1, armed="twice")
    until(machine.state_is_kept)
    assert (
        int((machine.guard / "state").read_text().split()[3]) < 100000
    )  # what was spent before does not count
    machine.limits(budget=1, armed="thrice")
    until(lambda: machine.done() == ["deadline first"])


def test_somebody_at_a_terminal_keeps_it_on(machine: Machine) -> None:
    terminals = machine.home / "terminals"
    terminals.mkdir()
    machine.limits(idle=1, quiet=NEVER)
    (terminals / "0").touch()
    machine.watch()
    machine.rounds(4)
    assert machine.done() == []
    (terminals / "0").unlink()
    until(lambda: machine.done() == ["idle first"])


def test_a_forgotten_terminal_is_not_paid_for(machine: Machine) -> None:
    (machine.home / "terminals").mkdir()
    (machine.home / "terminals/0").touch()
    machine.limits(idle=1, quiet=2)
    machine.watch()
    until(lambda: machine.done() == ["idle first"])


def test_a_gpu_that_works_for_somebody_else_is_not_idle(machine: Machine) -> None:
    machine.tool("nvidia-smi", f'echo "[N/A]"\ncat "{machine.home}/share"\n')
    (machine.home / "share").write_text("97\n")
    machine.limits(idle=1)
    machine.watch()
    machine.rounds(4)
    assert machine.done() == []
    (machine.home / "share").write_text("0\n")
    until(lambda: machine.done() == ["idle first"])


def test_stamps_in_the_future_and_a_broken_clock_change_nothing(machine: Machine) -> None:
    """Only whether stamps change counts, and no time of day is asked."""
    machine.run()
    machine.end_job()
    log = machine.runs / "jobs/job-1/log"
    os.utime(log, (4e9, 4e9))
    machine.tool("date", "exit 1\n")
    machine.limits(idle=2)
    machine.watch()
    until(lambda: machine.done() == ["idle first"])


def test_a_log_that_grows_and_a_tree_that_arrives_are_activity(machine: Machine) -> None:
    machine.run()
    arriving = machine.runs / "tree.new.4711"
    functions = script("watchdog.sh")
    marks = functions[functions.index("marks() {") :].partition("\n}\n")[0] + "\n}\nmarks 2>/dev/null"

    def seen() -> str:
        command = ["sh", "-c", f"terminals=/nowhere/pts\n{marks}"]
        return subprocess.run(command, cwd=machine.guard, capture_output=True, text=True, check=False).stdout

    before = seen()
    assert seen() == before
    (machine.runs / "jobs/job-1/log").write_text("a line\n")
    grown = seen()
    assert grown != before
    arriving.mkdir()
    (arriving / "first").write_text("x" * 8192)
    arrives = seen()
    assert arrives != grown
    (arriving / "second").write_text("x" * 8192)
    assert seen() != arrives


def test_what_was_spent_outlives_the_process(machine: Machine) -> None:
    machine.limits(budget=NEVER)
    machine.watch()
    assert machine.process is not None
    end(machine.process)  # with what it has just started: that would put its own state in this one's place
    boot = BOOT.read_text().strip()
    (machine.guard / "state").write_text(f"once {boot} {machine.uptime() - 50} 1000\n")
    machine.watch()
    until(lambda: int((machine.guard / "state").read_text().split()[3]) >= 1050)


def test_what_was_spent_outlives_a_restart_of_the_machine(machine: Machine) -> None:
    (machine.guard / "state").write_text(f"once another-boot {NEVER} 1000\n")
    machine.limits(budget=NEVER)
    machine.watch()
    before = machine.uptime()
    kept = (machine.guard / "state").read_text().split()
    assert kept[1] == BOOT.read_text().strip()
    assert int(kept[3]) - before + 62 >= 1000  # kept once a minute
    assert int(kept[3]) <= 1000 + machine.uptime()


@pytest.mark.parametrize(
    ("name", "text"),
    [("acted", "deadline once another-boot\nits budget was spent\n"), ("left", "left once another-boot\n")],
)
def test_who_starts_the_machine_again_may_use_it(machine: Machine, name: str, text: str) -> None:
    """The limits of a run that is long over do not power it off a second time; those of the next one do."""
    (machine.guard / "state").write_text("once another-boot 100 1000\n")
    (machine.guard / name).write_text(text)
    machine.limits(budget=1, idle=1)
    machine.watch()
    machine.rounds(4)
    assert machine.done() == []
    machine.limits(idle=1, armed="twice")
    until(lambda: machine.done() == ["idle first"])


def test_until_a_machine_that_is_being_stopped_is_off_its_limits_hold(machine: Machine) -> None:
    (machine.guard / "left").write_text(f"left once {BOOT.read_text().strip()}\n")
    machine.limits(idle=1)
    machine.watch()
    until(lambda: machine.done() == ["idle first"])


def test_a_full_disk_does_not_keep_it_from_acting(machine: Machine) -> None:
    machine.limits(idle=2)
    for name in ("state.new", "acted.new"):
        (machine.guard / name / "in the way").mkdir(parents=True)
    environment = os.environ | {"PATH": f"{machine.home}/tools:{os.environ['PATH']}"}
    machine.process = subprocess.Popen(
        ["sh", str(machine.guard / "watchdog.sh")], env=environment, start_new_session=True
    )
    until(lambda: machine.done() == ["idle first"])


def test_there_is_one_at_a_time(machine: Machine) -> None:
    machine.limits()
    machine.watch()
    second = subprocess.run(["sh", str(machine.guard / "watchdog.sh")], check=False)
    assert second.returncode == 0
    assert machine.process is not None
    assert (machine.guard / "pid").read_text().split()[0] == str(machine.process.pid)


def test_it_ends_when_it_is_removed(machine: Machine) -> None:
    machine.limits(budget=NEVER)
    machine.watch()
    (machine.guard / "limits").unlink()
    assert machine.process is not None
    assert machine.process.wait() == 0


def test_on_a_machine_of_ones_own_only_the_run_is_ended(machine: Machine) -> None:
    machine.run()
    machine.limits(budget=1, action="end")
    machine.watch()
    assert machine.jobs[-1].wait() == -signal.SIGTERM
    until(lambda: (machine.guard / "limits").read_text().startswith("0 0 "))
    assert machine.process is not None
    assert machine.process.poll() is None


@pytest.mark.parametrize("sudo", [False, True])
def test_how_a_machine_is_powered_off(machine: Machine, sudo: bool) -> None:
    """By stand-ins alone, and nothing else on PATH that could do it."""
    for name in ("shutdown", "systemctl", "poweroff", *(["sudo"] if sudo else [])):
        machine.tool(name, f'echo "{name} $*" >>"{machine.home}/done"\n')
    for name in ("cat", "dirname", "du", "flock", "mv", "rm", "stat", "sync", "timeout"):
        (machine.home / "tools" / name).symlink_to(program(name))
    machine.limits(idle=1, action="poweroff")
    machine.watch(PATH=f"{machine.home}/tools")
    until(lambda: machine.done() != [])
    assert machine.done() == ["sudo -n shutdown -h now" if sudo else "shutdown -h now"]


def test_the_script_is_posix() -> None:
    if (dash := shutil.which("dash")) is None:
        pytest.skip("needs dash")
    for name in ("watchdog.sh", "guard.sh", "job.sh", "relay.sh"):
        text = "main() {\n" + script(name) + "\n}\n"
        assert subprocess.run([dash, "-n"], input=text, text=True, check=False).returncode == 0


@pytest.mark.parametrize("name", ["watchdog.sh", "guard.sh", "job.sh", "relay.sh"])
def test_shellcheck(name: str) -> None:
    if (shellcheck := shutil.which("shellcheck")) is None:
        pytest.skip("needs shellcheck")
    # No "#!" line, since the text is sent; and sh -c with quoted text is what job.sh starts.
    command = [shellcheck, "-s", "sh", "-e", "SC2148,SC2016", "-"]
    done = subprocess.run(command, input=script(name), text=True, capture_output=True, check=False)
    assert done.stdout == ""
