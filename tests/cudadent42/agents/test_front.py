"""What the server answers ahead of the SDK is what the SDK would have answered, and the SDK goes on from there."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import mcp_types.version as sdk
import pytest
from served import LIMITS, ROOT, make_server

from cudadent42.agents.front import WITH_HANDSHAKE, WITHOUT, Front, Opening, listed_tools, open_connection

CLIENT = {"name": "test", "version": "1"}
META = {
    "io.modelcontextprotocol/protocolVersion": WITHOUT,
    "io.modelcontextprotocol/clientInfo": CLIENT,
    "io.modelcontextprotocol/clientCapabilities": {},
}


def request(number: int, method: str, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}


def initialize(version: str) -> dict[str, Any]:
    return request(1, "initialize", protocolVersion=version, capabilities={}, clientInfo=CLIENT)


INITIALIZED = {"jsonrpc": "2.0", "method": "notifications/initialized"}
OPENINGS = {
    **{version: (initialize(version), INITIALIZED, request(2, "tools/list")) for version in WITH_HANDSHAKE},
    WITHOUT: (request(1, "server/discover", _meta=META), request(2, "tools/list", _meta=META)),
    "without a question": (request(2, "tools/list", _meta=META),),
}


def line(message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


def by_the_sdk(root: Path, opening: Opening, answers: int) -> list[dict[str, Any]]:
    """The first answers of a server that hears this."""
    import anyio

    from cudadent42.agents.replay import Replayed, Unsaid

    async def run() -> list[dict[str, Any]]:
        server = make_server(root, LIMITS)
        to_server, heard = anyio.create_memory_object_stream[Any](9)
        said, from_server = anyio.create_memory_object_stream[Any](9)
        async with to_server, from_server, anyio.create_task_group() as group:
            streams = Replayed(heard, opening), Unsaid(said, opening)
            group.start_soon(server.run, *streams, server.create_initialization_options())
            messages = [(await from_server.receive()).message for _ in range(answers)]
            group.cancel_scope.cancel()
        return [message.model_dump(by_alias=True, mode="json", exclude_unset=True) for message in messages]

    return asyncio.run(run())


@pytest.mark.parametrize("name", OPENINGS)
def test_an_opening_is_answered_as_the_sdk_answers_it(name: str, project: Path) -> None:
    messages = OPENINGS[name]
    front = Front(listed_tools())
    answers = [front.answer(line(message)) for message in messages]
    assert None not in answers
    own = [answer for answer in answers if answer]
    opening = Opening(tuple(map(line, messages)), frozenset(), over=False)
    assert own == by_the_sdk(project, opening, len(own))


@pytest.mark.parametrize("name", OPENINGS)
def test_the_sdk_goes_on_from_there_and_repeats_nothing(name: str, project: Path) -> None:
    meta = {} if name in WITH_HANDSHAKE else {"_meta": META}
    call = request(7, "tools/call", name="budget", arguments={}, **meta)
    answered = frozenset(message["id"] for message in OPENINGS[name] if "id" in message)
    opening = Opening((*map(line, OPENINGS[name]), line(call)), answered, over=False)
    (answer,) = by_the_sdk(project, opening, 1)
    assert answer["id"] == 7
    assert answer["result"]["structuredContent"]["max_minutes"] == LIMITS.minutes


def test_it_has_the_sdks_versions_of_the_protocol() -> None:
    assert sdk.HANDSHAKE_PROTOCOL_VERSIONS == WITH_HANDSHAKE
    assert (WITHOUT,) == sdk.MODERN_PROTOCOL_VERSIONS


def test_the_listing_is_up_to_date() -> None:
    specification = importlib.util.spec_from_file_location(
        "update_mcp_tools", ROOT / "tools/update_mcp_tools.py"
    )
    assert specification is not None
    assert specification.loader is not None
    tool = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(tool)
    assert tool.PATH.read_text(encoding="utf-8") == tool.listing(), "run tools/update_mcp_tools.py"


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"no json",
        b"[1]",
        pytest.param(b"[" * 100_000 + b"]" * 100_000, id="nested too deeply"),
        line({**initialize("2025-11-25"), "jsonrpc": "1.0"}),
        line({**initialize("2025-11-25"), "id": True}),
        line({**initialize("2025-11-25"), "params": []}),
        line(initialize("1999-01-01")),
        line(request(1, "initialize", protocolVersion="2025-11-25", capabilities=3, clientInfo=CLIENT)),
        line(request(1, "initialize", protocolVersion="2025-11-25", capabilities={}, clientInfo={"name": 1})),
        line(request(1, "tools/list")),
        line(request(1, "tools/list", cursor="next", _meta=META)),
        line(request(1, "server/discover", _meta={**META, "io.modelcontextprotocol/protocolVersion": "1"})),
        line(request(1, "ping")),
        line(INITIALIZED),
    ],
)
def test_what_is_not_certain_is_the_sdks(message: bytes) -> None:
    assert Front([]).answer(message) is None


def test_nobody_shakes_hands_twice() -> None:
    front = Front([])
    assert front.answer(line(initialize("2025-11-25")))
    assert front.answer(line(initialize("2025-11-25"))) is None
    assert front.answer(line(OPENINGS[WITHOUT][0])) is None


class Talk:
    """An opening in a thread, with a client at the other ends of its pipes."""

    def __init__(self) -> None:
        read_from, self.to_front = os.pipe()
        self.from_front, write_to = os.pipe()
        self.prepared = 0
        self.opening: Opening | None = None

        def run() -> None:
            self.opening = open_connection(read_from, write_to, self.prepare)
            os.close(read_from)
            os.close(write_to)

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def prepare(self) -> None:
        self.prepared += 1

    def say(self, data: bytes) -> None:
        os.write(self.to_front, data)

    def hear(self) -> Any:
        data = b""
        while not data.endswith(b"\n"):
            data += os.read(self.from_front, 1 << 16)
        return json.loads(data)

    def end(self) -> Opening:
        os.close(self.to_front)
        self.thread.join()
        os.close(self.from_front)
        assert self.opening is not None
        return self.opening


def test_the_first_other_message_ends_it_with_all_that_was_said() -> None:
    talk = Talk()
    first, *others = map(line, OPENINGS["2025-11-25"])
    talk.say(first[:20])
    talk.say(first[20:])
    assert talk.hear()["id"] == 1
    call = line(request(3, "tools/call", name="budget"))
    behind = line(request(4, "tools/list"))
    talk.say(b"".join(others) + call + behind[:9])
    assert talk.hear()["id"] == 2
    talk.say(behind[9:])
    opening = talk.end()
    assert opening == Opening((first, *others, call, behind), frozenset({1, 2}), over=False)
    assert talk.prepared == 1


@pytest.mark.parametrize("said", [b"", line(OPENINGS[WITHOUT][0])])
def test_a_client_that_goes_needs_no_sdk(said: bytes) -> None:
    talk = Talk()
    talk.say(said)
    if said:
        assert talk.hear()["id"] == 1
    assert talk.end().over


def test_half_a_line_is_the_sdks() -> None:
    talk = Talk()
    talk.say(b'{"jsonrpc"')
    assert talk.end() == Opening((b'{"jsonrpc"',), frozenset(), over=False)


@pytest.mark.usefixtures("fresh_processes")
def test_the_first_answer_waits_for_no_sdk() -> None:
    script = (
        "import sys, cudadent42.commands.alone, cudadent42.agents.front\n"
        "heavy = {'mcp', 'pydantic', 'asyncio', 'torch', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
