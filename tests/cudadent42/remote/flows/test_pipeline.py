"""The order of a run elsewhere, with a provider from outside: what a step is given, and what an error at it leaves."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from cudadent42.base.errors import LabError, UsageError
from cudadent42.plan import Choices, RunOptions
from cudadent42.remote import providers
from cudadent42.remote.core import record, run
from cudadent42.remote.core.address import parse
from cudadent42.remote.core.consent import Consent
from cudadent42.remote.core.hosts import Remote
from cudadent42.remote.core.job import Workspace
from cudadent42.remote.core.money import Paid
from cudadent42.remote.core.protection import Terms
from cudadent42.remote.core.provider import Lease, Machine, Offer
from cudadent42.remote.core.record import JobRecord
from cudadent42.remote.core.run import Returned, RunRequest, workspace_of
from cudadent42.remote.core.terminal import Say
from cudadent42.remote.flows import pipeline
from cudadent42.runs.starts import MachineStart


class StillOnError(LabError):
    """The machine could not be ended."""


@dataclass
class Rented:
    """A provider of one machine, its offer and its lease, which write down what they are asked for."""

    steps: list[str] = field(default_factory=list)
    fails_at: str = ""
    terms: Terms | None = None
    request: RunRequest | None = None
    trouble: LabError | None = None

    scheme = "rented://"
    name = "rented"
    has_gpu = False
    architectures = ()
    log_is_shown = False

    def step(self, name: str) -> None:
        self.steps.append(name)
        if name == self.fails_at:
            raise LabError(f"{name} failed")

    @property
    def workspace(self) -> Workspace:
        return workspace_of(Remote("rented", parse("ssh://nowhere")))

    # the provider
    def has(self, remote: Remote) -> bool:
        return False

    def ran(self, begun: JobRecord) -> bool:
        return begun.remote == self.name

    def resolve(self, on: str, device: str, say: Say) -> Offer:
        self.step("resolve")
        return self

    def reach(self, remote: Remote, begun: JobRecord | None = None) -> Workspace:
        return self.workspace

    def adopt(self, begun: JobRecord, terms: Terms, say: Say, *, start: bool = False) -> Lease:
        self.step("adopt")
        return self

    def machine(self, start: MachineStart) -> Machine | None:
        return None

    # the offer
    def cost(self) -> Paid:
        self.step("cost")
        return Paid(rate="gcp-l4", rented=True, starting=True, own_environment=True)

    def agree(self, terms: Terms, say: Say) -> Offer:
        self.step("agree")
        return self

    def start(self, terms: Terms, say: Say) -> Lease:
        self.terms = terms
        self.step("start")
        return self

    # the lease
    def begin(self, request: RunRequest, on_log: Callable[[bytes], None]) -> JobRecord:
        self.request = request
        self.step("begin")
        begun = JobRecord(
            "job", self.name, str(request.output), request.arguments, "2026-01-01T00:00:00+00:00"
        )
        record.save(begun)
        return begun

    def keep(self, returned: Returned) -> None:
        self.step("keep")

    def failed(self, error: BaseException) -> None:
        self.step("failed")

    def end(self) -> LabError | None:
        self.step("end")
        return self.trouble


@pytest.fixture
def rented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rented:
    subprocess.run(["git", "init", "-q", str(tmp_path / "project")], check=True)
    monkeypatch.setattr(run, "project_root", lambda: tmp_path / "project")
    for variable in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    provider = Rented()
    monkeypatch.setattr(providers, "PROVIDERS", (provider, *providers.PROVIDERS))

    def bring_back(
        workspace: Workspace, begun: JobRecord, say: Say, on_log: Callable[[bytes], None]
    ) -> Returned:
        provider.step("bring back")
        return Returned(begun, 0, Path(begun.output), "the result\n")

    monkeypatch.setattr(pipeline, "bring_back", bring_back)
    return provider


def options(output: Path, **changes: object) -> pipeline.RemoteOptions:
    wanted = RunOptions(choices=Choices("small"), device="cpu", output=output)
    return replace(pipeline.RemoteOptions(on="rented://x", run=wanted, verbose=True), **changes)  # type: ignore[arg-type]


def carried_out(output: Path, said: list[str], **changes: object) -> run.Ended:
    consent = Consent(given=True)
    return pipeline.run(options(output, **changes), consent, said.append, lambda chunk: None)


ORDER = ["resolve", "cost", "agree", "start", "begin", "bring back", "keep", "end"]


def test_the_steps_are_in_order(rented: Rented, tmp_path: Path) -> None:
    said: list[str] = []
    ended = carried_out(tmp_path / "run", said, max_cost=5.0)
    assert rented.steps == ORDER
    assert (ended.returned.output, ended.trouble) == ("the result\n", None)
    assert any(line.startswith("rented: at most about") for line in said)
    assert rented.terms is not None
    assert rented.terms.limit is not None
    assert rented.terms.limit.usd == 5.0
    assert rented.terms.estimate is not None
    assert rented.terms.run_s > 0
    assert rented.request is not None
    assert rented.request.output == tmp_path / "run"
    assert {"--device=cpu", "--suite=small", "--verbose"} <= set(rented.request.arguments)


@pytest.mark.parametrize("step", ["resolve", "agree", "start"])
def test_what_fails_before_there_is_a_lease_ends_none(rented: Rented, tmp_path: Path, step: str) -> None:
    rented.fails_at = step
    (tmp_path / "run").mkdir()
    with pytest.raises(LabError, match=f"{step} failed"):
        carried_out(tmp_path / "run", [])
    assert rented.steps == ORDER[: ORDER.index(step) + 1]
    assert (tmp_path / "run").exists() is (step != "start")  # an empty folder of a run that never was


@pytest.mark.parametrize("step", ["begin", "bring back", "keep"])
def test_a_lease_has_one_end_however_the_run_ends(rented: Rented, tmp_path: Path, step: str) -> None:
    rented.fails_at = step
    with pytest.raises(LabError, match=f"{step} failed"):
        carried_out(tmp_path / "run", [])
    assert rented.steps == [*ORDER[: ORDER.index(step) + 1], "failed"]


def test_what_is_not_agreed_on_is_not_started(rented: Rented, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="above --max-cost"):
        pipeline.run(options(tmp_path / "run", max_cost=0.01), Consent(), print, lambda chunk: None)
    assert rented.steps == ["resolve", "cost"]


def test_what_needs_no_machine_is_checked_before_it_is_looked_at(rented: Rented, tmp_path: Path) -> None:
    unknown = RunOptions(choices=Choices("small", cases=("neither",)), device="cpu")
    with pytest.raises(UsageError, match="neither"):
        carried_out(tmp_path / "run", [], run=unknown)
    assert rented.steps == []


def test_a_machine_that_is_still_on_is_told_with_what_came_back(rented: Rented, tmp_path: Path) -> None:
    rented.trouble = StillOnError("it is on")
    ended = carried_out(tmp_path / "run", [])
    assert (ended.returned.exit_code, ended.trouble) == (0, rented.trouble)


def test_a_run_that_was_left_is_adopted_by_its_provider(rented: Rented, tmp_path: Path) -> None:
    rented.fails_at = "bring back"
    with pytest.raises(LabError):
        carried_out(tmp_path / "run", [])
    rented.fails_at = ""
    rented.steps.clear()
    begun = record.find(None)
    assert providers.provider_of_run(begun) is rented
    assert pipeline.attach(begun, Terms(), print, lambda chunk: None).returned.output == "the result\n"
    assert rented.steps == ["adopt", "bring back", "keep", "end"]
    with pytest.raises(UsageError, match="no machine that --start could start"):
        pipeline.attach(begun, Terms(), print, lambda chunk: None, start=True)
