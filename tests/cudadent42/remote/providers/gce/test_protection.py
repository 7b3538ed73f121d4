"""What a run may cost, from the command line to the machine that holds it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from command_line import ROOT, cudadent42
from sshd import spend_budget
from standin import BENCH, Cloud

from cudadent42.base.errors import MachineNotReadyError, UsageError
from cudadent42.commands.common import say
from cudadent42.commands.machines import consent_of
from cudadent42.cost import rates
from cudadent42.plan import Choices, RunOptions
from cudadent42.remote.core import protection
from cudadent42.remote.core.address import parse
from cudadent42.remote.core.consent import NOBODY, WHILE_IT_COSTS_S, Consent
from cudadent42.remote.core.hosts import Remote, make, save
from cudadent42.remote.core.money import END_S
from cudadent42.remote.core.protection import ANY_TERMS, IDLE_S, Limit, Terms, limits_for
from cudadent42.remote.core.record import CloudRecord
from cudadent42.remote.core.run import Ended, RunRequest
from cudadent42.remote.core.watchdog import Action, Limits
from cudadent42.remote.flows import pipeline
from cudadent42.remote.providers.gce.checks import prepare
from cudadent42.remote.providers.gce.provider import Candidate
from cudadent42.runs import starts
from cudadent42.runs.starts import StartOutcome

DAY_S = 24 * 3600
BESIDE = ".local/state/cudadent42/watchdog"
NOW = datetime(2026, 11, 1, 12, tzinfo=timezone.utc)
SMALL = ("--suite", "small", "--case", "tiny", "--dtype", "fp32", "--device", "cpu")


def limit(usd: float) -> Limit:
    """At $0.71 an hour."""
    return Limit(usd, rates.load().get("gcp-l4"))


def up_to(usd: float) -> Terms:
    return Terms(limit(usd))


def on(start: str | None = "a start", after: str = "stop", minutes_ago: float = 0) -> CloudRecord:
    since = (NOW - timedelta(minutes=minutes_ago)).isoformat()
    return CloudRecord(BENCH, "gcp-l4", start, since, after, "auto", False, "")


def test_what_a_machine_may_do() -> None:
    assert limits_for(on(), ANY_TERMS, NOW) == Limits(idle_s=IDLE_S, budget_s=DAY_S)
    assert limits_for(on(after="keep:45"), ANY_TERMS, NOW) == Limits(idle_s=45 * 60, budget_s=DAY_S)
    assert limits_for(on(after="keep:1"), ANY_TERMS, NOW) == Limits(idle_s=IDLE_S, budget_s=DAY_S)
    assert not limits_for(on(after="keep"), ANY_TERMS, NOW).hold
    # Of one that is estimated to take long, the day is no limit.
    assert limits_for(on(), Terms(run_s=DAY_S), NOW).budget_s == 2 * DAY_S
    assert limits_for(on(), Terms(run_s=DAY_S / 3), NOW).budget_s == DAY_S
    # $0.71 are an hour, of which the start took ten minutes, and the end takes its own.
    assert limits_for(on(minutes_ago=10), up_to(0.71), NOW) == Limits(idle_s=IDLE_S, budget_s=3000 - END_S)
    assert limits_for(on(after="keep"), up_to(0.71), NOW) == Limits(budget_s=3600 - END_S)
    assert limits_for(on(minutes_ago=-90), up_to(0.71), NOW) == limits_for(on(), up_to(0.71), NOW)
    with pytest.raises(UsageError, match="too little for a run"):
        limits_for(on(minutes_ago=59), up_to(0.71), NOW)


@pytest.mark.parametrize("cloud", [None, on(start=None, minutes_ago=500)])
def test_a_machine_that_was_not_started_here_is_never_powered_off(cloud: CloudRecord | None) -> None:
    assert not limits_for(cloud, ANY_TERMS, NOW).hold
    assert limits_for(cloud, up_to(0.71), NOW) == Limits(budget_s=3600, action=Action.END)


def bench(cloud: Cloud, after: str = "stop", **variables: str) -> Remote:
    cloud.add()
    made = make(
        "bench",
        parse(BENCH),
        python=cloud.python(**variables),
        after=after,
        rate="gcp-l4",
        unguarded_start=True,
    )
    save(made)
    return made


def test_a_run_within_its_limit(cloud: Cloud, tmp_path: Path) -> None:
    bench(cloud)
    done = cudadent42(
        "run", "--on", "bench", *SMALL, "--max-cost", "2.50", "--output-dir", "here", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "of gcp-l4: $0." in done.stderr
    assert (
        "bench: the watchdog powers the machine off when it is idle for 15 min or when it has been on for"
        in done.stderr
    )
    assert cloud.status() == "TERMINATED"
    guard = cloud.server.folder / "home/.local/state/cudadent42/watchdog"
    assert (guard / "left").exists()  # its limits end with this stop


def test_a_machine_that_could_not_be_stopped_is_still_watched(cloud: Cloud, tmp_path: Path) -> None:
    """As when the login of gcloud has expired during a long run."""
    remote = bench(cloud)
    cloud.fails("compute instances stop", "login-expired")
    ended, _ = said_by(cloud, tmp_path, remote, None)
    assert ended.trouble is not None
    assert cloud.status() == "RUNNING"
    guard = cloud.server.folder / "home/.local/state/cudadent42/watchdog"
    assert (guard / "limits").read_text().startswith(f"{IDLE_S} {DAY_S} ")


def test_the_limits_of_who_started_the_machine_are_not_taken_back_by_another(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another laptop, or after the journal was lost: nobody else would end it."""
    remote = bench(cloud)
    cloud.fails("compute instances stop", "login-expired")
    said_by(cloud, tmp_path, remote, None)
    guard = cloud.server.folder / "home/.local/state/cudadent42/watchdog"
    assert (guard / "limits").read_text().startswith(f"{IDLE_S} {DAY_S} ")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another laptop"))
    (tmp_path / "out").rename(tmp_path / "first")
    _, said = said_by(cloud, tmp_path, remote, None)
    assert any("was running before this run" in line for line in said)
    assert (guard / "limits").read_text().startswith(f"{IDLE_S} {DAY_S} ")


def test_a_machine_that_is_kept_has_no_limits_left(cloud: Cloud, tmp_path: Path) -> None:
    said_by(cloud, tmp_path, bench(cloud, after="keep:30"), None)
    guard = cloud.server.folder / "home/.local/state/cudadent42/watchdog"
    assert (guard / "limits").read_text().startswith("0 0 ")


def agreed(remote: Remote, max_cost: float | None, yes: bool = False, as_json: bool = False) -> Limit | None:
    run = RunOptions(choices=Choices("small", cases=("tiny",), dtypes=("fp32",)), device="cpu")
    options = pipeline.RemoteOptions(on=remote.name, run=run, max_cost=max_cost, as_json=as_json)
    offer = Candidate(prepare(remote, "cpu"))
    terms = pipeline.terms_of(offer, options, consent_of(yes, as_json), say)
    assert offer.agree(terms, say) == offer
    return terms.limit


@pytest.mark.parametrize("as_json", [False, True])
def test_above_the_limit_nothing_is_started_where_nobody_can_be_asked(cloud: Cloud, as_json: bool) -> None:
    remote = bench(cloud)
    with pytest.raises(UsageError, match=r"above --max-cost 0\.02; nothing was started.*--yes"):
        agreed(remote, 0.02, as_json=as_json)


def test_what_is_agreed_on_is_the_limit(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    remote = bench(cloud)
    assert agreed(remote, 5.0) == limit(5.0)
    assert agreed(remote, None) is None
    more = agreed(remote, 0.02, yes=True)
    assert more is not None
    estimated = capsys.readouterr().err.splitlines()[-1]
    assert estimated.startswith("bench: at most about ")
    assert estimated.endswith(f"/h of gcp-l4: ${more.usd:.2f}")


def test_a_rate_that_is_not_known_is_not_guessed(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    cloud.add()
    remote = make("bench", parse(BENCH), python=cloud.python(), rate="our-price", unguarded_start=True)
    with pytest.raises(UsageError, match=r"no rate 'our-price' is known.*\[\[rate\]\].*cost rates"):
        agreed(remote, 5.0)
    assert agreed(remote, None) is None
    assert "cannot be estimated" in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "code"), [("n", 2), pytest.param("y", 0, marks=pytest.mark.slow)])
def test_on_a_terminal_somebody_is_asked(cloud: Cloud, tmp_path: Path, answer: str, code: int) -> None:
    bench(cloud)
    ours, theirs = pty.openpty()
    command = ("run", "--on", "bench", *SMALL, "--max-cost", "0.02", "--output-dir", "here")
    process = subprocess.Popen(
        [sys.executable, "-m", "cudadent42", *command],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "CUDADENT42_LEDGER": "none"},
        stdin=theirs,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    said = b""
    try:
        while b"[y/N]" not in said:
            said += os.read(ours, 1024)
        os.write(ours, f"{answer}\n".encode())
        while True:
            said += os.read(ours, 1024)
    except OSError:  # the other side is closed
        pass
    os.close(ours)
    assert process.wait() == code, said.decode()
    assert b"above --max-cost 0.02; run for up to $0." in said
    assert bool(starts.load()) == (code == 0)


def test_a_limit_without_a_machine_is_refused(tmp_path: Path) -> None:
    done = cudadent42("run", *SMALL, "--max-cost", "5", cwd=tmp_path)
    assert done.returncode == 2
    assert "name the machine with --on" in done.stderr


def said_by(
    cloud: Cloud,
    tmp_path: Path,
    remote: Remote,
    limit: Limit | None,
    consent: Consent = NOBODY,
    on_log: Callable[[bytes], None] = lambda _: None,
) -> tuple[Ended, list[str]]:
    said: list[str] = []
    terms = Terms(limit, 0.0, consent)
    request = RunRequest(device="cpu", arguments=(), output=tmp_path / "out")
    ended = pipeline.carry_out(Candidate(prepare(remote, "cpu")), request, terms, said.append, on_log)
    return ended, said


def test_where_nothing_can_hold_the_limit_the_run_does_not_begin(cloud: Cloud, tmp_path: Path) -> None:
    remote = bench(cloud)
    (cloud.folder / "sudo.refuses").touch()
    with pytest.raises(MachineNotReadyError, match="can power the machine off neither as root"):
        said_by(cloud, tmp_path, remote, limit(5.0))
    assert cloud.status() == "TERMINATED"
    assert [start.outcome for start in starts.load()] == [StartOutcome.FAILED]


@pytest.mark.parametrize("asked", [False, True])
def test_a_machine_that_nothing_there_would_end_is_ended_where_nobody_agrees(
    cloud: Cloud, tmp_path: Path, asked: bool
) -> None:
    """Without a limit too: its idle limit could not be had either."""
    remote = bench(cloud)
    (cloud.folder / "sudo.refuses").touch()
    questions: list[tuple[str, float | None]] = []

    def refuse(question: str, within_s: float | None) -> bool:
        questions.append((question, within_s))
        return False

    with pytest.raises(
        MachineNotReadyError, match=r"nothing but this machine ends the costs of bench.*--yes"
    ):
        said_by(cloud, tmp_path, remote, None, Consent(ask=refuse if asked else None))
    # Whoever walked away from the question must not pay for that.
    assert [seconds for _, seconds in questions] == [WHILE_IT_COSTS_S] * asked
    assert cloud.status() == "TERMINATED"
    assert [start.outcome for start in starts.load()] == [StartOutcome.FAILED]


def test_who_agrees_may_look_after_it_alone(cloud: Cloud, tmp_path: Path) -> None:
    remote = bench(cloud)
    (cloud.folder / "sudo.refuses").touch()
    ended, said = said_by(cloud, tmp_path, remote, None, Consent(given=True))
    assert ended.returned.exit_code == 0
    assert any("nothing but this machine ends the costs of bench" in line for line in said)


def test_who_keeps_a_machine_without_limits_is_not_asked(cloud: Cloud, tmp_path: Path) -> None:
    remote = bench(cloud, after="keep")
    (cloud.folder / "sudo.refuses").touch()
    ended, _ = said_by(cloud, tmp_path, remote, None)
    assert ended.returned.exit_code == 0


def test_a_run_that_reaches_its_limit_is_ended_and_comes_back(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = bench(cloud, PAUSE="1000")
    action = tmp_path / "action"
    action.write_text("#!/bin/sh\n")
    action.chmod(0o755)
    long = Limits(budget_s=DAY_S, tick_s=1, action=str(action), terminals=str(tmp_path))
    monkeypatch.setattr(protection, "limits_for", lambda *_: long)
    home = cloud.server.folder / "home"

    def measured(_: bytes) -> None:
        """The budget ends once something was measured, however long that took."""
        if not action.with_name("spent").exists():
            while not any(path.read_text() for path in home.glob("*/jobs/*/run/samples.csv")):
                time.sleep(0.05)
            action.with_name("spent").touch()
            spend_budget(home / BESIDE)

    ended, said = said_by(cloud, tmp_path, remote, limit(5.0), on_log=measured)
    assert any("its budget was spent" in line for line in said)
    assert ended.returned.exit_code != 0
    assert (tmp_path / "out/samples.csv").read_text() == "1\n"
    assert cloud.status() == "TERMINATED"
