"""What a user has in front of them, for tests of whole runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from standin import BENCH, Cloud, read_specification

from cudadent42.remote.core import hosts, record
from cudadent42.remote.core.address import SpecificationFile, parse
from cudadent42.remote.core.consent import Consent
from cudadent42.remote.core.hosts import Remote
from cudadent42.remote.core.policy import parse_after
from cudadent42.remote.core.protection import Terms
from cudadent42.remote.core.run import Ended, RunRequest
from cudadent42.remote.flows import pipeline
from cudadent42.remote.providers.gce.checks import Prepared, prepare
from cudadent42.remote.providers.gce.provider import Candidate
from cudadent42.runs import starts
from cudadent42.runs.starts import StartOutcome

ARGUMENTS = ("--case=$(touch bad)", "--suite=; touch bad", "--dtype=a\nb")
AGREED = Terms(consent=Consent(given=True))


@dataclass
class Lab:
    """What a user has in front of them: a remote, an output folder, and a terminal."""

    cloud: Cloud
    folder: Path
    said: list[str] = field(default_factory=list)
    log: bytearray = field(default_factory=bytearray)

    @property
    def output(self) -> Path:
        return self.folder / "runs/out"

    def remote(self, after: str = "stop", results: str = "", **python: str) -> Remote:
        made = Remote(
            "there",
            parse(BENCH),
            python=self.cloud.python(**python),
            after=parse_after(after),
            rate="gcp-l4",
            results=results,
        )
        hosts.save(made)
        return made

    def fresh(self, after: str = "stop", pause: str = "0", lines: str = "3", **changes: object) -> Remote:
        # No GPU there, so no driver to wait for.
        read_specification(self.folder, **{"machine_type": "n2-standard-8", **changes})
        made = Remote(
            "there",
            SpecificationFile(self.folder / "machine.toml"),
            python=self.cloud.python(PAUSE=pause, LINES_OF_IT=lines),
            after=parse_after(after),
        )
        hosts.save(made)
        return made

    def run(
        self, remote: Remote, on_log: Callable[[bytes], None] | None = None, device: str = "cpu"
    ) -> Ended:
        return self.run_on(prepare(remote, device), on_log, device)

    def run_on(
        self,
        prepared: Prepared,
        on_log: Callable[[bytes], None] | None = None,
        device: str = "cpu",
        terms: Terms = AGREED,
    ) -> Ended:
        request = RunRequest(device=device, arguments=ARGUMENTS, output=self.output)
        on_log = self.log.extend if on_log is None else on_log
        return pipeline.carry_out(Candidate(prepared), request, terms, self.said.append, on_log)

    def attach(self, start: bool = False, terms: Terms = AGREED) -> Ended:
        return pipeline.attach(record.find(None), terms, self.said.append, self.log.extend, start=start)

    @property
    def text(self) -> str:
        return "\n".join(self.said)

    @property
    def outcomes(self) -> list[StartOutcome]:
        return [start.outcome for start in starts.load()]

    def is_open(self) -> bool:
        return any(start.ended is None for start in starts.load())


def interrupt(chunk: bytes) -> None:
    """Ctrl-C while the log is shown."""
    raise KeyboardInterrupt
