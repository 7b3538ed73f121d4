"""What is on of SkyPilot's machines, what a run there may cost, and the end of all of it."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import typer
from command_line import cudadent42
from sky_lab import PYTHON, SPEC, Sky, only_start, says

from cudadent42.base.errors import UsageError
from cudadent42.commands.common import say
from cudadent42.commands.machines import show_machines
from cudadent42.cost import rates
from cudadent42.remote.core import record
from cudadent42.remote.core.consent import Consent
from cudadent42.remote.core.record import JobRecord
from cudadent42.remote.core.run import Returned
from cudadent42.remote.core.states import MachineState
from cudadent42.remote.flows import pipeline
from cudadent42.remote.flows.stopping import Stopped, stop_all
from cudadent42.remote.flows.survey import Survey, survey
from cudadent42.remote.providers.sky import lease
from cudadent42.remote.providers.sky import provider as sky
from cudadent42.remote.providers.sky.cluster import Cluster, clusters_in
from cudadent42.remote.providers.sky.spec import Spec
from cudadent42.runs import starts
from cudadent42.runs.starts import StartOutcome

NAME = "sky://c42-l4"


def look(later: timedelta = timedelta(0)) -> Survey:
    return survey(rates.load(), datetime.now(timezone.utc) + later)


def a_start(ready: bool = True) -> None:
    begun = starts.request(NAME, "gcp-l4")
    if ready:
        starts.mark(begun, StartOutcome.READY)


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("UP", MachineState.RUNNING),
        ("INIT", MachineState.STARTING),
        ("AUTOSTOPPING", MachineState.STOPPING),
    ],
)
def test_what_is_on_and_what_it_has_cost(cloud: Sky, word: str, state: MachineState) -> None:
    a_start()
    says(cloud, word, "Starting SkyPilot API server...\n[some notice]\n")
    (started,) = look(timedelta(minutes=30)).started
    assert (started.state, started.problem) == (state, "")
    assert started.usd == pytest.approx(0.71 * started.minutes / 60)
    assert only_start().outcome is StartOutcome.READY


@pytest.mark.parametrize(
    ("ready", "outcome"),
    [
        (True, StartOutcome.DELETED),
        (False, StartOutcome.FAILED),
    ],
)
def test_one_that_is_not_there_any_more(cloud: Sky, ready: bool, outcome: StartOutcome) -> None:
    a_start(ready)
    says(cloud, None)
    seen = look(timedelta(hours=1))
    assert (seen.started, [line.outcome for line in seen.corrected]) == ((), [outcome])
    assert only_start().outcome is outcome
    assert look() == Survey((), ())


def test_what_is_on_the_disk_of_a_stopped_one_is_had_back_with_what_is_said(
    cloud: Sky, capsys: pytest.CaptureFixture[str]
) -> None:
    """``attach --start`` is for machines of a cloud that is asked itself."""
    a_start()
    now = datetime.now(timezone.utc).isoformat()
    record.save(JobRecord("job-1", SPEC.cluster, "/nowhere", (), now, folder="there", start=only_start().id))
    says(cloud, "STOPPED")
    show_machines(as_json=False)
    assert (
        "not brought back: job-1; sky start c42-l4 --idle-minutes-to-autostop=10 --down; then: "
        "cudadent42 remote attach job-1\n" in capsys.readouterr().out
    )


def test_one_that_is_stopped_is_shown_until_it_is_taken_down(cloud: Sky) -> None:
    """Its disk costs, whoever stopped it."""
    a_start()
    says(cloud, "STOPPED")
    first = look(timedelta(hours=1))
    assert [line.outcome for line in first.corrected] == [StartOutcome.STOPPED]
    for started in (*first.started, *look(timedelta(hours=2)).started):
        assert started.word == "stopped"
        assert started.minutes < 1  # it is not paid for as one that runs
        assert started.problem == "its disk costs until it is taken down: sky down c42-l4"
    assert stop_all(look().started, print) == (Stopped(NAME, True, "taken down"),)
    assert only_start().outcome is StartOutcome.DELETED
    assert look() == Survey((), ())


def test_one_that_was_started_again_is_shown(cloud: Sky) -> None:
    a_start()
    says(cloud, "STOPPED")
    look()
    says(cloud, "UP")
    first = look(timedelta(minutes=30))
    assert [(line.outcome, line.reason) for line in first.corrected] == [
        (StartOutcome.READY, "it runs, although it had ended")
    ]
    assert first.started[0].word == "running"
    assert first.started[0].minutes == pytest.approx(30, abs=1)  # by the dear side
    assert look().corrected == ()


def test_runs_of_a_machine_before_it_are_not_on_it(left_alone: Sky) -> None:
    """They went with that one; they keep nobody from taking this one down."""
    starts.mark(only_start().id, StartOutcome.DELETED)
    a_start()
    (started,) = look().started
    assert started.jobs == ()


def test_a_start_that_is_not_answered_yet_is_waited_for(cloud: Sky) -> None:
    a_start(ready=False)
    says(cloud, None)
    (started,) = look().started
    assert started.word == "asked for"
    assert only_start().outcome is StartOutcome.REQUESTED
    assert not stop_all((started,), print)[0].ended


@pytest.mark.parametrize("text", ["", "NAME  STATUS\nc42-l4  UP", "[1, 2]", '[{"name": "c42-l4"}]', "[\n{"])
def test_what_cannot_be_read_is_not_known(cloud: Sky, text: str) -> None:
    assert clusters_in(text) is None
    a_start()
    (cloud.folder / "status").write_text(text)
    (started,) = look(timedelta(hours=1)).started
    assert started.word == "not known"
    assert "look with `sky status --refresh`; end it with: sky down c42-l4" in started.problem
    assert only_start().outcome is StartOutcome.READY


def test_a_word_that_is_not_known_and_no_sky_at_all(cloud: Sky, monkeypatch: pytest.MonkeyPatch) -> None:
    a_start()
    says(cloud, "DREAMING")
    assert "'DREAMING'" in look().started[0].problem
    monkeypatch.setenv("PATH", "/nowhere")
    assert "not on PATH" in look().started[0].problem
    (left,) = stop_all(look().started, print)
    assert not left.ended
    assert "sky down c42-l4" in left.what


def test_a_kept_machine_is_taken_down(cloud: Sky) -> None:
    cloud.run(replace(SPEC, keep=True))
    assert stop_all(look().started, print) == (Stopped(NAME, True, "taken down"),)
    assert cloud.calls()[-1] == ["down", "--yes", "c42-l4"]
    assert only_start().outcome is StartOutcome.DELETED


def test_one_that_refuses_is_named(cloud: Sky) -> None:
    a_start()
    says(cloud, "UP")
    (cloud.folder / "down-fails").write_text("")
    (left,) = stop_all(look().started, print)
    assert not left.ended
    assert "it goes on costing money: sky down c42-l4" in left.what
    assert only_start().outcome is StartOutcome.READY


@pytest.fixture
def left_alone(cloud: Sky, monkeypatch: pytest.MonkeyPatch) -> Sky:
    """A run that is over there, and that nobody brought back."""

    def interrupted(*arguments: object) -> Returned:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "bring_back", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cloud.run()
    return cloud


def test_what_was_measured_is_brought_back_before(left_alone: Sky) -> None:
    (started,) = look().started
    assert [begun.job for begun in started.jobs] == [record.find(None).job]
    assert stop_all((started,), print) == (Stopped(NAME, True, "taken down"),)
    assert (left_alone.output / "remote.log").read_text() == "measuring\n"


@pytest.mark.parametrize("stops", [True, False])
def test_what_cannot_be_brought_back_keeps_its_disk(left_alone: Sky, stops: bool) -> None:
    (started,) = look().started
    left_alone.server.cut()
    left_alone.server.process.terminate()
    left_alone.server.process.wait()
    if not stops:
        (left_alone.folder / "stop-fails").write_text("")
    (done,) = stop_all((started,), print)
    assert done.ended is stops
    assert "which could not be brought back" in done.what
    assert "sky down c42-l4" in done.what
    assert [call[0] for call in left_alone.calls()][-1] == "stop"
    assert only_start().outcome is (StartOutcome.STOPPED if stops else StartOutcome.READY)
    if stops:
        # Nothing comes from it before it is started, which costs: that is the user's to say.
        (again,) = stop_all(look().started, print)
        assert again.ended
        assert f"its disk has what {started.jobs[0].job} measured" in again.what
        assert "sky start c42-l4 --idle-minutes-to-autostop=10 --down" in again.what
        assert "to take it down: sky down c42-l4" in again.what
        assert [call[0] for call in left_alone.calls()][-1] == "stop"


def test_runs_whose_machine_is_gone_keep_nothing_from_being_ended(left_alone: Sky) -> None:
    """There is nothing to end, and nothing to bring back; it is said once."""
    Cluster(SPEC.cluster).end()
    left_alone.server.cut()  # as its connections are
    assert look().started == ()
    (done,) = stop_all((), print)
    assert done.ended
    assert "ended with its machine: SkyPilot has no c42-l4 any more" in done.what
    assert stop_all((), print) == ()


# ---- what a run may cost


def test_above_the_limit_nothing_is_asked_for_where_nobody_can_be_asked(cloud: Sky, tmp_path: Path) -> None:
    (tmp_path / "gpu.toml").write_text('cluster = "c42-l4"\nrate = "gcp-l4"\nidle_minutes = 7\n')
    run = ("run", "--on", "sky://gpu.toml", "--suite", "small", "--device", "cpu")
    done = cudadent42(*run, "--max-cost", "0.01", cwd=tmp_path)
    assert done.returncode == 2
    assert "idle 7.0" in done.stderr
    assert "above --max-cost 0.01" in done.stderr
    assert starts.load() == ()
    assert not (cloud.folder / "calls").exists()


def test_the_command_ends_with_what_may_still_cost(
    cloud: Sky, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from cudadent42.commands.elsewhere import run_there
    from cudadent42.commands.options import Elsewhere, Shown
    from cudadent42.plan import Choices, RunOptions

    (tmp_path / "gpu.toml").write_text('cluster = "c42-l4"\nrate = "gcp-l4"\nidle_minutes = 7\n')
    on = f"sky://{tmp_path / 'gpu.toml'}"
    run = RunOptions(choices=Choices("small"), device="cpu", output=tmp_path / "first")
    elsewhere, shown = Elsewhere(on=on, max_cost=0.01, yes=True), Shown(verbose=True)
    with pytest.raises(typer.Exit) as ended:
        run_there(on, elsewhere, run, shown)
    assert ended.value.exit_code == 0
    assert {"--device=cpu", "--verbose"} <= set((tmp_path / "first/arguments").read_text().splitlines())
    assert only_start().outcome is StartOutcome.DELETED
    # A run that passed is an error where its machine goes on.
    cloud.will("down-fails")
    with pytest.raises(typer.Exit) as ended:
        run_there(on, elsewhere, replace(run, output=tmp_path / "second"), shown)
    assert ended.value.exit_code == 4
    told = capsys.readouterr()
    assert told.out == "the result\n" * 2
    assert "error: NOT TAKEN DOWN: SkyPilot could not take it down" in told.err


def test_what_was_agreed_on_becomes_the_longest_time(
    cloud: Sky, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from cudadent42.plan import Choices, RunOptions

    def within(spec: Spec, max_cost: float | None = None, yes: bool = False, kept: str | None = None) -> Spec:
        run = RunOptions(choices=Choices("small"), device="cpu")
        options = pipeline.RemoteOptions(on="", run=run, max_cost=max_cost)
        wanted = sky.Wanted(spec, kept)
        return wanted.agree(pipeline.terms_of(wanted, options, Consent(given=yes), say), say).spec

    assert within(SPEC) == SPEC
    free = replace(SPEC, rate="local")
    assert within(free, 0.0) == free
    dear = within(SPEC, 1000.0)
    assert dear.max_minutes == SPEC.max_minutes
    agreed = within(SPEC, 0.01, yes=True)
    assert 5 <= agreed.max_minutes < SPEC.max_minutes
    assert f"ended {agreed.max_minutes} min after" in capsys.readouterr().err
    # Start 6.1, idle 7 and end 3 min are not the run's.
    usd = 0.71 * (60 + 16.1) / 60
    assert within(SPEC, usd).max_minutes == pytest.approx(60, abs=1)
    # Of one that runs already, its end is paid for all the same.
    usd = 0.71 * (60 + 10) / 60
    assert within(SPEC, usd, kept="a start").max_minutes == pytest.approx(60, abs=1)


def test_at_its_longest_time_a_run_is_ended_and_comes_back(cloud: Sky, project: Path) -> None:
    slow = PYTHON.replace('echo "the result"', "sleep 1000")
    (project / "python").write_text(slow)
    (project / "tools/bootstrap.sh").write_text(
        (project / "tools/bootstrap.sh").read_text().replace("exit 0", "sleep 1; exit 0")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lease, "task", hasty)
        returned = cloud.run()
    assert returned.exit_code != 0
    assert (cloud.output / "remote.log").read_text().startswith("measuring\n")
    assert only_start().outcome is StartOutcome.DELETED


def hasty(*arguments: object) -> str:
    """The task with seconds in place of minutes."""
    from cudadent42.remote.providers.sky.task import task

    document = json.loads(task(*arguments))  # type: ignore[arg-type]
    document["run"] = document["run"].replace(f" + {60 * SPEC.max_minutes}))", " + 4))")
    return json.dumps(document)


def test_too_little_for_a_run() -> None:
    from cudadent42.remote.core import money

    rate = rates.load().get("gcp-l4")
    started = money.Estimate(rate, (money.Part("start", 6, ""), money.Part(money.RUN, 10, "")))
    with pytest.raises(UsageError, match=r"too little for a run; raise --max-cost"):
        money.run_minutes(0.71 * 6.5 / 60, started)
    assert money.run_minutes(0.71 * 26.5 / 60, started) == 20
