"""One request in flight, for plain Python: an iterator over its events.

Owns the wait for messages, taking the stream up again after its connection broke, and leaving it.
Does not know what messages mean (`stream`) or when to try again (`claim`).
Invariant: a `Stream` belongs to one thread, `cancel` may be called from any.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Final, Self

from common.errors import Cancelled, DFlashError, NotReady, PeerLost, PeerSilent
from common.net.zeromq import ClientLink
from common.sdk.claim import MAX_CONNECT_S, Claim
from common.sdk.pool import Pool
from common.sdk.request import Request
from common.sdk.stream import Completion, Event, StreamState
from common.wire.messages import Cancel, Message, StatusRequest, Submit

LEAVE_S: Final = 1.0  # for the answer to a Cancel, so that nothing runs on and the link is kept


class Stream:
    """One request in flight: iterate over its events, then read `completion`."""

    def __init__(self, pool: Pool, request: Request) -> None:
        now = time.monotonic()
        self._pool = pool
        self._claim = Claim(request.submit(), request.resume_s, request.timeout_s, now)
        self._state = StreamState(self._claim.submit.request, now, request.timeout_s)
        self._is_cancelled = threading.Event()
        self._link: ClientLink | None = pool.take()
        try:
            self._begin(self._link, self._claim.submit)
        except PeerLost as fault:
            self._take_up(fault)
        except BaseException:
            self._drop()
            raise

    @property
    def completion(self) -> Completion:
        """The whole reply, once the iteration is over."""
        if self._state.completion is None:
            raise DFlashError("completion: the stream has not ended; iterate over it first")
        return self._state.completion

    @property
    def n_resumed(self) -> int:
        """How often the connection broke and the stream was taken up again."""
        return self._claim.n_resumed

    def __iter__(self) -> Iterator[Event]:
        """Yield events until the request is done; raise its error when it fails."""
        try:
            while self._state.completion is None:
                event = self._next()
                if event is not None:
                    yield event
        finally:
            self.close()

    def cancel(self) -> None:
        """Ask for an end within one round; the iteration then raises Cancelled."""
        self._is_cancelled.set()
        link = self._link
        if link is not None:
            with contextlib.suppress(PeerLost):  # it is being taken up again, or has its error
                link.send(Cancel(request=self._state.request))

    def close(self) -> None:
        """Cancel if it still runs, and let go of the connection."""
        link = self._link
        if link is None:
            return
        try:
            if not self._state.is_over:
                with contextlib.suppress(DFlashError):
                    link.send(Cancel(request=self._state.request))
                    self._hear_the_end(link)
        finally:
            self._link = None
            self._pool.give(link) if self._state.is_over else link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _hear_the_end(self, link: ClientLink) -> None:
        """Take what was still on its way; a Failed is raised, and is the end."""
        until = time.monotonic() + LEAVE_S
        while not self._state.is_over:
            message = link.recv(max(0.0, until - time.monotonic()))
            self._state.on_message(message, time.monotonic())

    def _next(self) -> Event | None:
        """Wait for one message, or for the moment when silence has to be judged."""
        if self._link is None:
            raise DFlashError("stream: it was closed before its end")
        try:
            return self._hear(self._link)
        except PeerLost as fault:
            if self._state.is_over:
                raise  # the request's own end, not the connection's
            self._take_up(fault)
            return None

    def _hear(self, link: ClientLink) -> Event | None:
        read = self._claim.read(len(self._state.token_ids))  # all that came was taken
        if read is not None:
            link.send(read)
        message = self._recv(link)
        if message is not None:
            event = self._state.on_message(message, time.monotonic())
            self._claim.heard()
            return event
        if self._state.on_time(time.monotonic()):
            link.send(StatusRequest(request=self._state.request))
        return None

    def _recv(self, link: ClientLink) -> Message | None:
        wait_s = max(0.0, self._state.next_deadline() - time.monotonic())
        try:
            return link.recv(wait_s)
        except PeerSilent:
            return None

    def _begin(self, link: ClientLink, submit: Submit) -> None:
        link.send(submit)
        if self._is_cancelled.is_set():  # asked for while there was no connection
            link.send(Cancel(request=submit.request))

    def _take_up(self, fault: PeerLost) -> None:
        """Open another connection and go on where the tokens ended.

        Raises:
            PeerLost: the loss, where nobody answered in time.
            Cancelled: it was cancelled meanwhile.
        """
        self._drop()
        self._pool.forget_idle()
        while self._pool.address.may_answer() and self._claim.left_s(time.monotonic()) > 0:
            if self._is_cancelled.wait(self._claim.pause_s(time.monotonic())):
                raise Cancelled(f"request {self._state.request}: cancelled")
            with contextlib.suppress(PeerLost, PeerSilent, NotReady):
                left_s = self._claim.left_s(time.monotonic())
                link = self._link = self._pool.open(min(left_s, MAX_CONNECT_S))
                now = time.monotonic()
                self._begin(link, self._claim.again(len(self._state.token_ids), now))
                self._state.resumed(now)
                return
            self._drop()
        raise fault
