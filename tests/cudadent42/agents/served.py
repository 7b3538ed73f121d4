"""What the tests of the server share: a client in memory, and what they ask of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from cudadent42.decisions.allowance import Limits

mcp = pytest.importorskip("mcp", reason="needs the extra mcp; ./test.sh installs it")
jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema; ./test.sh installs it")

make_server = pytest.importorskip("cudadent42.agents.server").make_server

ROOT = Path(__file__).resolve().parents[3]
LIMITS = Limits(minutes=30.0, usd=5.0, ask_above_usd=1.0)
MODES = ("legacy", "auto")
"""Of the protocol: with a handshake, and without."""

ANY = {"max_minutes": 30, "max_money": 0}


def with_client(
    root: Path,
    use: Callable[[Any], Awaitable[None]],
    *,
    mode: str = "auto",
    limits: Limits = LIMITS,
    **more: Any,
) -> None:
    async def run() -> None:
        async with mcp.Client(make_server(root, limits), mode=mode, **more) as client:
            await use(client)

    asyncio.run(run())


async def answer(client: Any, tool: str, **arguments: Any) -> Any:
    """What a tool gives; the client has checked it against the schema that is published for it."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    assert json.loads(result.content[0].text) == result.structured_content
    return result.structured_content


async def refusal(client: Any, tool: str, **arguments: Any) -> str:
    result = await client.call_tool(tool, arguments)
    assert result.is_error, result.structured_content
    text: str = result.content[0].text
    return text


async def ended(client: Any, race: str, told: list[tuple[float, str]] | None = None) -> Any:
    """The status of a race once it is over."""

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        assert total == 1.0
        if told is not None:
            told.append((progress, message or ""))

    while True:
        result = await client.call_tool("race_status", {"race": race, "wait_s": 60}, progress_callback=hear)
        if result.structured_content["state"] != "running":
            return result.structured_content


async def processes(project: Path) -> list[int]:
    """Those of ``without_end``, once they are there."""
    while not (project / "processes").exists():
        await asyncio.sleep(0.05)
    return [int(word) for word in (project / "processes").read_text().split()]


async def until_gone(pids: list[int]) -> None:
    while any(runs(pid) for pid in pids):
        await asyncio.sleep(0.05)


def runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
