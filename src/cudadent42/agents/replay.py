"""A connection that began before the SDK, which hears what the client said, and does not repeat what was answered."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import TypeAlias, TypeVar

import anyio
from mcp import types
from mcp.shared.message import SessionMessage

from cudadent42.agents.front import Opening, RequestId

Heard: TypeAlias = SessionMessage | Exception
"""As the SDK's transports hand it on: a message, or what is wrong with a line."""


_Stream = TypeVar("_Stream", bound="_Wrapped")


class _Wrapped:
    """What both directions have in common."""

    def __init__(self, stream: object) -> None:
        self._stream = stream

    async def aclose(self) -> None:
        await self._stream.aclose()  # type: ignore[attr-defined]

    async def __aenter__(self: _Stream) -> _Stream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


class Replayed(_Wrapped):
    """A stream of messages that begins with those of the opening."""

    def __init__(self, stream: object, opening: Opening) -> None:
        super().__init__(stream)
        self._lines = deque(opening.lines)

    async def receive(self) -> Heard:
        if self._lines:
            await anyio.lowlevel.checkpoint()
            return _parsed(self._lines.popleft())
        heard: Heard = await self._stream.receive()  # type: ignore[attr-defined]
        return heard

    def __aiter__(self: _Stream) -> _Stream:
        return self

    async def __anext__(self) -> Heard:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None


class Unsaid(_Wrapped):
    """A stream of answers without those that the client has."""

    def __init__(self, stream: object, opening: Opening) -> None:
        super().__init__(stream)
        self._answered: set[RequestId] = set(opening.answered)

    async def send(self, item: SessionMessage) -> None:
        message = item.message
        if isinstance(message, types.JSONRPCResponse | types.JSONRPCError) and message.id in self._answered:
            self._answered.discard(message.id)
            return
        await self._stream.send(item)  # type: ignore[attr-defined]


def _parsed(line: bytes) -> Heard:
    try:
        return SessionMessage(types.jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        return error
