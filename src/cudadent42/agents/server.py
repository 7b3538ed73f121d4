"""The tools over the Model Context Protocol, by the official SDK: the one module that imports it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from mcp import types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import Server
from mcp.server.stdio import stdio_server

from cudadent42.agents.desk import Desk
from cudadent42.agents.front import INSTRUCTIONS, NAME, Opening
from cudadent42.agents.outward import plain_answer
from cudadent42.agents.replay import Replayed, Unsaid
from cudadent42.agents.service import Service, make_service
from cudadent42.agents.tools import TOOLS, Tool
from cudadent42.base.errors import LabError, UsageError
from cudadent42.base.json_schema import schema_of
from cudadent42.base.serialise import encode
from cudadent42.decisions.allowance import Limits
from cudadent42.version import __version__

_QUESTIONS_IN_RESULTS = "2026-07-28"
"""From this version of the protocol on, a question to the person is the answer to a call, which is then repeated."""

_AGREEMENT: dict[str, Any] = {
    "type": "object",
    "properties": {"agree": {"type": "boolean", "title": "Agree", "description": "Whether it may begin."}},
    "required": ["agree"],
}

Context: TypeAlias = ServerRequestContext[Service]


class _UnansweredError(Exception):
    """A question that has to go to the person before the call can go on."""

    def __init__(self, key: str, request: types.ElicitRequest) -> None:
        super().__init__(key)
        self.result = types.InputRequiredResult(input_requests={key: request})


@dataclass
class _Client:
    """The person behind one call, by way of the client."""

    context: Context
    params: types.CallToolRequestParams
    highest: float = field(default=-1.0)

    async def agrees(self, question: str) -> bool:
        capabilities = self.context.session.client_capabilities
        if capabilities is None or capabilities.elicitation is None:
            raise UsageError(
                f"{question} The person has to say, and this client cannot ask; ask for less, or have the server "
                "started with a higher --ask-above"
            )
        if self.context.protocol_version < _QUESTIONS_IN_RESULTS:  # versions are dates
            return _agreed(
                await self.context.session.elicit_form(question, _AGREEMENT, self.context.request_id)
            )
        # By the question's own words: an answer to another one is none to this.
        key = f"agree-{hashlib.sha256(question.encode()).hexdigest()[:16]}"
        answer = (self.params.input_responses or {}).get(key)
        if answer is None:
            form = types.ElicitRequestFormParams(message=question, requested_schema=_AGREEMENT)
            raise _UnansweredError(key, types.ElicitRequest(params=form))
        return _agreed(answer)

    async def told(self, progress: float, what: str) -> None:
        if progress > self.highest:  # the protocol's own rule
            self.highest = progress
            await self.context.session.report_progress(progress, 1.0, what)


def _agreed(answer: object) -> bool:
    return (
        isinstance(answer, types.ElicitResult)
        and answer.action == "accept"
        and (answer.content or {}).get("agree") is True
    )


def make_server(root: Path, limits: Limits) -> Server[Service]:
    """A server for the project in ``root``."""
    listed = types.ListToolsResult(tools=listed_tools())

    @asynccontextmanager
    async def lifespan(_: Server[Service]) -> AsyncIterator[Service]:
        async with Desk(root) as desk:
            yield make_service(root, limits, desk)

    async def list_tools(_: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return listed

    return Server(
        NAME,
        version=__version__,
        instructions=INSTRUCTIONS,
        lifespan=lifespan,
        on_list_tools=list_tools,
        on_call_tool=_call,
    )


def listed_tools() -> list[types.Tool]:
    """What a client is told of the tools; `front.LISTING` is a copy of it."""
    return [_listed(tool) for tool in TOOLS.values()]


def _listed(tool: Tool) -> types.Tool:
    return types.Tool(
        name=tool.name,
        description=tool.description,
        input_schema=schema_of(tool.takes),
        output_schema=schema_of(tool.gives),
        annotations=types.ToolAnnotations(
            read_only_hint=tool.read_only,
            destructive_hint=tool.destructive,
            idempotent_hint=tool.idempotent,
            open_world_hint=False,
        ),
    )


async def _call(
    context: Context, params: types.CallToolRequestParams
) -> types.CallToolResult | types.InputRequiredResult:
    try:
        record = await context.lifespan_context.call(
            params.name, params.arguments or {}, _Client(context, params)
        )
    except _UnansweredError as question:
        return question.result
    except LabError as error:
        text = f"{plain_answer(str(error))} (exit code {int(error.exit_code)})"
        return types.CallToolResult(content=[types.TextContent(text=text)], is_error=True)
    answer = plain_answer(encode(record))
    text = json.dumps(answer, ensure_ascii=False)
    return types.CallToolResult(content=[types.TextContent(text=text)], structured_content=answer)


def serve(root: Path, limits: Limits, opening: Opening, ready: Callable[[], None] = lambda: None) -> None:
    """On standard input and output, until the client is gone. ``opening``: what was said before."""
    logging.disable(logging.INFO)

    async def run() -> None:
        server = make_server(root, limits)
        async with stdio_server() as (read, write):
            ready()
            streams = Replayed(read, opening), Unsaid(write, opening)
            await server.run(*streams, server.create_initialization_options())

    asyncio.run(run())
