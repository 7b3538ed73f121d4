"""Whole loops of scripted agents that have nothing but the server's tools and a folder to edit."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cudadent42.decisions.allowance import Limits
from cudadent42.schemas import FILES, schema

jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema; ./test.sh installs it")
mcp = pytest.importorskip("mcp", reason="needs the extra mcp; ./test.sh installs it")
make_server = pytest.importorskip("cudadent42.agents.server").make_server

ROOT = Path(__file__).resolve().parents[3]
SUITE = """
name = "agents"
dtypes = ["fp32"]
repeats = 8
warmup = 1
timer = "cpu"
case = [{ name = "small", batch = 1, num_heads = 4, seqlen = 256, head_dim = 64 }]
"""
KERNEL = '''
"""Attention that is computed more than once."""
from flashmoe_science import flash_attention

TIMES = {times}


def attention(query, key, value, *, causal, softmax_scale):
    for _ in range(TIMES):
        output = flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)
    return output
'''
LIMITS = Limits(minutes=60.0, usd=0.0, ask_above_usd=0.0)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a kernel that is slow on purpose."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    root = (tmp_path / "project").resolve()
    root.mkdir()
    (root / "agents.toml").write_text(SUITE)
    (root / "kernel.py").write_text(KERNEL.format(times=27))
    (root / ".gitignore").write_text("runs/\n")
    git(root, "init", "--quiet")
    commit(root, "slow")
    return root


def git(root: Path, *words: str) -> None:
    who = ("-c", "user.name=agent", "-c", "user.email=agent@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *words], cwd=root, check=True, capture_output=True)


def commit(root: Path, message: str) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "-m", message)


class Agent:
    """What it knows is what the tools told it."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def ask(self, tool: str, **arguments: Any) -> Any:
        result = await self._client.call_tool(tool, arguments)
        assert not result.is_error, result.content
        return result.structured_content

    async def race(self, **wish: Any) -> Any:
        started = await self.ask(
            "race_start", device="cpu", suite="agents.toml", max_minutes=60, max_money=0, **wish
        )
        status = {"state": "running"}
        while status["state"] == "running":
            status = await self.ask("race_status", race=started["race"], wait_s=60)
        assert status["state"] == "finished", status
        return await self.ask("race_result", race=started["race"])


def check_schemas(runs: Path) -> None:
    """Of races of revisions, as they are written."""
    folders = list(runs.iterdir())
    assert len(folders) == 3
    for folder in folders:
        for name in ("manifest", "results", "verify"):
            document = json.loads((folder / FILES[name].file).read_text())
            assert list(jsonschema.Draft202012Validator(schema(name)).iter_errors(document)) == []


@pytest.mark.slow
def test_an_agent_makes_a_kernel_faster_three_times_and_ends_with_a_claim(project: Path) -> None:
    quotes = []

    async def loop() -> None:
        async with mcp.Client(make_server(project, LIMITS)) as client:
            agent = Agent(client)
            assert (await agent.ask("preflight", device="cpu"))["ready"]
            for times in (9, 3, 1):
                (project / "kernel.py").write_text(KERNEL.format(times=times))
                result = await agent.race(implementation="kernel.py:attention", against="HEAD")
                assert result["verified"]
                assert result["results"]["verdict"] == "faster", result["results"]
                assert (result["claim_allowed"], result["exit_code"]) == (True, 0), result["claim_reason"]
                assert "confirmed on 1 of 1 cases in processes apart" in result["claim_reason"]
                quotes.append(result["quote"])
                commit(project, f"{times} times")

    asyncio.run(loop())
    check_schemas(project / "runs")
    assert len(set(quotes)) == 3
    for quote in quotes:
        assert "is faster than HEAD@" in quote
        assert "95 % interval" in quote


@pytest.mark.slow
@pytest.mark.parametrize("cheat", ["baseline_wrapped", "kept_by_pointer"])
def test_an_agent_that_cheats_ends_without_a_claim(project: Path, cheat: str) -> None:
    (project / "cheat.py").write_text((ROOT / f"tests/adversaries/cheats/{cheat}.py").read_text())

    async def loop() -> None:
        async with mcp.Client(make_server(project, LIMITS)) as client:
            result = await Agent(client).race(implementation="cheat.py:attention")
            assert (result["claim_allowed"], result["quote"]) == (False, "")
            assert result["claim_reason"]
            assert result["exit_code"] != 0
            assert result["results"]["integrity"]["findings"]
            # Nor does it have one after it wrote one into the folder.
            path = project / result["folder"] / "results.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), "claim_allowed": True}))
            again = await client.call_tool("race_result", {"race": result["race"]})
            assert again.is_error
            assert "does not follow" in again.content[0].text

    asyncio.run(loop())
