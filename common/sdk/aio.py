"""The client for asyncio: the same verbs as `client`, awaited.

Owns connections to the coordinator, one per request in flight, and keeps idle ones for the next.
Does not know how a request is followed (`stream`) or checked (`request`).
Invariant: a client and its streams belong to one event loop.
"""

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from common.errors import DFlashError, PeerSilent, WireError
from common.net.zeromq import AsyncClientLink
from common.sdk.client import STATUS_S
from common.sdk.locate import locate
from common.sdk.options import Options
from common.sdk.request import HELLO_S, Request, check_welcome, client_hello, make_request
from common.sdk.stream import Completion, Event, StreamState, parse_status
from common.wire.messages import Cancel, Message, Status, StatusRequest


class AsyncClient:
    """A client of a running system, for asyncio; arguments as for `Client`."""

    def __init__(
        self,
        name: str | None = None,
        *,
        run_dir: Path | None = None,
        file: Path | None = None,
        endpoint: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._address = locate(name, run_dir, file, endpoint)
        self._timeout_s = timeout_s
        self._idle: list[AsyncClientLink] = []
        self._is_closed = False

    async def generate(
        self,
        prompt: str | None = None,
        *,
        prompt_ids: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> Completion:
        """As `Client.generate`; cancelling the task cancels the request."""
        async with self.stream(prompt, prompt_ids=prompt_ids, **options) as stream:
            async for _ in stream:
                pass
            return stream.completion

    def stream(
        self,
        prompt: str | None = None,
        *,
        prompt_ids: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> "AsyncStream":
        """As `Client.stream`; the request is sent when the iteration begins."""
        options.setdefault("timeout_s", self._timeout_s)
        return AsyncStream(self, make_request(prompt, prompt_ids, **options))

    async def status(self) -> dict[str, Any]:
        """What runs and how it does, as the coordinator sees it."""
        link = await self._take()
        try:
            link.send(StatusRequest(request="status"))
            message = await _recv_status(link)
        except BaseException:
            link.close()
            raise
        self._give(link)
        return parse_status(message)

    async def aclose(self) -> None:
        """Close idle connections; streams that are open keep theirs until they end."""
        self._is_closed = True
        links, self._idle = self._idle, []
        for link in links:
            link.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _take(self) -> AsyncClientLink:
        if self._idle:
            return self._idle.pop()
        link = AsyncClientLink(self._address.endpoint, self._address.keys)
        try:
            await link.connect()
            link.send(client_hello())
            check_welcome(await link.recv(HELLO_S))
        except BaseException:
            link.close()
            raise
        return link

    def _give(self, link: AsyncClientLink) -> None:
        if self._is_closed:
            link.close()
        else:
            self._idle.append(link)


class AsyncStream:
    """One request: iterate over its events with `async for`, then read `completion`."""

    def __init__(self, client: AsyncClient, request: Request) -> None:
        self._client = client
        self._request = request
        self._link: AsyncClientLink | None = None
        self._state: StreamState | None = None

    @property
    def completion(self) -> Completion:
        """The whole reply, once the iteration is over."""
        if self._state is None or self._state.completion is None:
            raise DFlashError("completion: the stream has not ended; iterate over it first")
        return self._state.completion

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yield events until the request is done; raise its error when it fails."""
        state, link = await self._begin()
        try:
            while state.completion is None:
                message = await _recv(link, state)
                if message is not None:
                    event = state.on_message(message, time.monotonic())
                    if event is not None:
                        yield event
                elif state.on_time(time.monotonic()):
                    link.send(StatusRequest(request=state.request))
        finally:
            self.close()

    def cancel(self) -> None:
        """Ask for an end within one round; the iteration then raises Cancelled."""
        if self._link is not None and self._state is not None:
            self._link.send(Cancel(request=self._state.request))

    def close(self) -> None:
        """Cancel if it still runs, and let go of the connection."""
        link, self._link = self._link, None
        if link is None or self._state is None:
            return
        if self._state.is_over:
            self._client._give(link)
            return
        with contextlib.suppress(DFlashError):
            link.send(Cancel(request=self._state.request))
        link.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def _begin(self) -> tuple[StreamState, AsyncClientLink]:
        if self._state is not None:
            raise DFlashError("stream: it can be iterated once; ask for a new one")
        submit = self._request.submit()
        link = await self._client._take()
        self._link = link
        self._state = StreamState(submit.request, time.monotonic(), self._request.timeout_s)
        link.send(submit)
        return self._state, link


async def _recv(link: AsyncClientLink, state: StreamState) -> Message | None:
    """One message, or None when the time has come to judge the silence."""
    try:
        return await link.recv(max(0.0, state.next_deadline() - time.monotonic()))
    except PeerSilent:
        return None


async def _recv_status(link: AsyncClientLink) -> Status:
    """The next Status; what an earlier request left on the connection is passed over."""
    limit = time.monotonic() + STATUS_S
    while True:
        message = await link.recv(max(0.0, limit - time.monotonic()))
        if isinstance(message, Status):
            return message
        if time.monotonic() > limit:
            raise WireError(f"StatusRequest: expected Status, got {type(message).__name__}")
