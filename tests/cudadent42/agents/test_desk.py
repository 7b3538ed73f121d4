"""Jobs of a server: their money, and their end."""

from __future__ import annotations

import asyncio
import os
from datetime import date
from pathlib import Path

import pytest

from cudadent42.agents import desk as desks
from cudadent42.agents.desk import Desk, State, exit_code
from cudadent42.agents.project import Project
from cudadent42.agents.service import Service
from cudadent42.agents.tasks import Preflight
from cudadent42.base.errors import ExitCode, UsageError
from cudadent42.cost.rates import Rate
from cudadent42.decisions.allowance import Allowance, Limits

WRITES = """
import os, sys, time
os.write(int(sys.argv[1]), {data!r})
time.sleep(3600)
"""


@pytest.mark.parametrize(
    "data",
    [b"no news\n", b"\xff\xfe\n", b'{"fraction": "x"}\n', b'{"exit_code": 999, "error": "x"}\n'],
)
def test_a_job_of_which_the_news_cannot_be_read_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(desks, "_MODULE", "writes_no_news")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    (tmp_path / "writes_no_news.py").write_text(WRITES.format(data=data))

    async def use() -> None:
        async with Desk(tmp_path) as desk:
            allowance = Allowance(60.0, 0.0, must_be_agreed=False)
            job = await desk.start("preflight", Preflight("cpu"), "cpu", allowance, 0.0)
            await asyncio.wait_for(job.until_done(), 120.0)
            assert job.state is State.FAILED
            assert "no news" in job.error
            assert exit_code(job) is ExitCode.INTERNAL_ERROR
            assert job.process is not None
            await asyncio.wait_for(job.process.wait(), 120.0)

    asyncio.run(use())


class Slow:
    """A person who answers when told to."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def agrees(self, question: str) -> bool:
        self.asked.set()
        await self.may_answer.wait()
        return False

    async def told(self, progress: float, what: str) -> None: ...


def test_two_starts_at_once_do_not_have_the_same_money(tmp_path: Path) -> None:
    rate = Rate("mine", 3.0, date(2026, 11, 1), "a test")
    wish = {"device": "cpu", "max_minutes": 30, "max_money": 1.5}

    async def use() -> None:
        async with Desk(tmp_path) as desk:
            service = Service(Project(tmp_path), Limits(30.0, 2.0, 1.0), rate, desk)
            person = Slow()
            first = asyncio.create_task(service.call("verify", wish, person))
            await person.asked.wait()
            assert desk.committed_usd == 1.5
            with pytest.raises(UsageError, match=r"from 0 to 0\.5"):
                await service.call("verify", wish, Slow())
            person.may_answer.set()
            with pytest.raises(UsageError, match="did not agree"):
                await first
            assert desk.committed_usd == 0.0

    asyncio.run(use())
