"""One request in flight, for asyncio, and the connections that such requests use.

Owns the wait for messages, taking a stream up again after its connection broke, and leaving it.
Does not know what messages mean (`stream`) or when to try again (`claim`).
Invariant: a pool and its streams belong to one event loop.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from common.errors import Cancelled, DFlashError, NotReady, PeerLost, PeerSilent
from common.net.zeromq import CONNECT_S, AsyncClientLink
from common.sdk.claim import MAX_CONNECT_S, Claim
from common.sdk.inflight import LEAVE_S
from common.sdk.locate import Address
from common.sdk.request import HELLO_S, Request, check_welcome, client_hello
from common.sdk.stream import Completion, Event, StreamState
from common.wire.messages import Cancel, Message, StatusRequest, Submit


class AsyncPool:
    """Connections to one coordinator: one per request in flight, idle ones for the next.

    Args:
        address: where it is.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self._idle: list[AsyncClientLink] = []
        self._leaving: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def take(self) -> AsyncClientLink:
        """An idle connection, or a new one."""
        return self._idle.pop() if self._idle else await self.open()

    async def open(self, timeout_s: float | None = None) -> AsyncClientLink:
        """As `Pool.open`."""
        link = AsyncClientLink(self.address.endpoint, self.address.keys)
        try:
            await (link.connect() if timeout_s is None else link.connect(min(timeout_s, CONNECT_S)))
            link.send(client_hello())
            wait_s = HELLO_S if timeout_s is None else min(timeout_s, HELLO_S)
            check_welcome(await link.recv(wait_s))
        except BaseException:
            link.close()
            raise
        return link

    def give(self, link: AsyncClientLink) -> None:
        """A connection that nobody needs now."""
        if self._is_closed:
            link.close()
        else:
            self._idle.append(link)

    def leave(self, link: AsyncClientLink, state: StreamState) -> None:
        """Cancel a request that nobody follows any more; its connection is kept once it has ended.

        The answer is awaited by a task of its own: whoever leaves may be cancelled itself.
        """
        task = asyncio.get_running_loop().create_task(self._leave(link, state))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _leave(self, link: AsyncClientLink, state: StreamState) -> None:
        try:
            with contextlib.suppress(DFlashError):  # a Failed is the end that is awaited
                until = time.monotonic() + LEAVE_S
                while not state.is_over:
                    message = await link.recv(max(0.0, until - time.monotonic()))
                    state.on_message(message, time.monotonic())
        finally:
            self.give(link) if state.is_over else link.close()

    def forget_idle(self) -> None:
        """Close idle connections: one to the same coordinator broke."""
        links, self._idle = self._idle, []
        for link in links:
            link.close()

    async def close(self) -> None:
        """Wait for cancels that are on their way, then close idle connections."""
        self._is_closed = True
        await asyncio.gather(*self._leaving, return_exceptions=True)
        self.forget_idle()


class AsyncStream:
    """One request: iterate over its events with `async for`, then read `completion`."""

    def __init__(self, pool: AsyncPool, request: Request) -> None:
        self._pool = pool
        self._request = request
        self._link: AsyncClientLink | None = None
        self._state: StreamState | None = None
        self._claim: Claim | None = None
        self._is_cancelled = asyncio.Event()

    @property
    def completion(self) -> Completion:
        """The whole reply, once the iteration is over."""
        if self._state is None or self._state.completion is None:
            raise DFlashError("completion: the stream has not ended; iterate over it first")
        return self._state.completion

    @property
    def n_resumed(self) -> int:
        """How often the connection broke and the stream was taken up again."""
        return 0 if self._claim is None else self._claim.n_resumed

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yield events until the request is done; raise its error when it fails."""
        if self._state is not None:
            raise DFlashError("stream: it can be iterated once; ask for a new one")
        now, request = time.monotonic(), self._request
        claim = self._claim = Claim(request.submit(), request.resume_s, request.timeout_s, now)
        state = self._state = StreamState(claim.submit.request, now, request.timeout_s)
        try:
            self._link = await self._pool.take()
            await self._begin(claim, state)
            while state.completion is None:
                event = await self._next(claim, state)
                if event is not None:
                    yield event
        finally:
            self.close()

    def cancel(self) -> None:
        """Ask for an end within one round; the iteration then raises Cancelled."""
        self._is_cancelled.set()
        if self._link is not None and self._state is not None:
            with contextlib.suppress(PeerLost):  # it is being taken up again, or has its error
                self._link.send(Cancel(request=self._state.request))

    def close(self) -> None:
        """Cancel if it still runs, and let go of the connection."""
        link, self._link = self._link, None
        if link is None or self._state is None:
            return
        if self._state.is_over:
            self._pool.give(link)
            return
        try:
            link.send(Cancel(request=self._state.request))
            self._pool.leave(link, self._state)
        except DFlashError:
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

    async def _begin(self, claim: Claim, state: StreamState) -> None:
        try:
            self._submit(claim.submit)
        except PeerLost as fault:  # an idle connection that broke meanwhile
            await self._take_up(fault, claim, state)

    async def _next(self, claim: Claim, state: StreamState) -> Event | None:
        """Wait for one message, or for the moment when silence has to be judged."""
        if self._link is None:
            raise DFlashError("stream: it was closed before its end")
        try:
            return await self._hear(self._link, claim, state)
        except PeerLost as fault:
            if state.is_over or self._link is None:
                raise  # the request's own end, not the connection's
            await self._take_up(fault, claim, state)
            return None

    async def _hear(self, link: AsyncClientLink, claim: Claim, state: StreamState) -> Event | None:
        read = claim.read(len(state.token_ids))  # all that came was taken
        if read is not None:
            link.send(read)
        message = await _recv(link, state)
        if message is not None:
            event = state.on_message(message, time.monotonic())
            claim.heard()
            return event
        if state.on_time(time.monotonic()):
            link.send(StatusRequest(request=state.request))
        return None

    def _submit(self, submit: Submit) -> None:
        if self._link is None:
            raise DFlashError("stream: it was closed before its end")
        self._link.send(submit)
        if self._is_cancelled.is_set():  # asked for while there was no connection
            self._link.send(Cancel(request=submit.request))

    async def _take_up(self, fault: PeerLost, claim: Claim, state: StreamState) -> None:
        """As `Stream._take_up`."""
        self._drop()
        self._pool.forget_idle()
        while self._pool.address.may_answer() and claim.left_s(time.monotonic()) > 0:
            await asyncio.sleep(claim.pause_s(time.monotonic()))
            if self._is_cancelled.is_set():
                raise Cancelled(f"request {state.request}: cancelled")
            with contextlib.suppress(PeerLost, PeerSilent, NotReady):
                left_s = claim.left_s(time.monotonic())
                self._link = await self._pool.open(min(left_s, MAX_CONNECT_S))
                now = time.monotonic()
                self._submit(claim.again(len(state.token_ids), now))
                state.resumed(now)
                return
            self._drop()
        raise fault

    def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()


async def _recv(link: AsyncClientLink, state: StreamState) -> Message | None:
    """One message, or None when the time has come to judge the silence."""
    try:
        return await link.recv(max(0.0, state.next_deadline() - time.monotonic()))
    except PeerSilent:
        return None
