"""The client for plain Python: one call, one reply, or a stream of events.

Owns connections to the coordinator, one per request in flight, and keeps idle ones for the next.
Does not know how a request is followed (`stream`) or checked (`request`).
Invariant: a `Client` may be used from several threads; a `Stream` from one, and `cancel` from any.
"""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from common.errors import DFlashError, PeerSilent, WireError
from common.net.zeromq import ClientLink
from common.sdk.locate import locate
from common.sdk.options import Options, options_of_each
from common.sdk.request import HELLO_S, Request, check_welcome, client_hello, make_request
from common.sdk.stream import Completion, Event, StreamState, parse_status
from common.wire.messages import Cancel, Message, Status, StatusRequest

STATUS_S = 5.0


class Client:
    """A client of a running system.

    Args:
        name: of a run on this machine; None: the one that the environment names, else `default`.
        run_dir: a run folder instead of a name.
        file: a TOML file whose `net.control` and `keys` lead to another machine.
        endpoint: an explicit address, such as `ipc:///run/.../control.sock`, instead of a name.
        timeout_s: deadline of every request that gives none of its own.

    Example:
        >>> with Client() as client:  # doctest: +SKIP
        ...     print(client.generate("def f(", max_tokens=16).text)
    """

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
        self._idle: list[ClientLink] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def generate(
        self,
        prompt: str | None = None,
        *,
        prompt_ids: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> Completion:
        """Generate and wait for the whole reply.

        Args:
            prompt: text; or give `prompt_ids`, or `messages` among the options.
            prompt_ids: token ids.
            **options: see `common.sdk.options.Options`.

        Raises:
            BadRequest, Unsupported, TooLong: the request cannot be served as asked.
            Busy: the queue is full; carries `retry_after_s`.
            DeadlineExceeded: `timeout_s` passed.
            PeerLost, PeerSilent: the system is gone.
        """
        with self.stream(prompt, prompt_ids=prompt_ids, **options) as stream:
            return _drained(stream)

    def stream(
        self,
        prompt: str | None = None,
        *,
        prompt_ids: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> "Stream":
        """Generate and yield events as they come; leaving the loop early cancels."""
        options.setdefault("timeout_s", self._timeout_s)
        return Stream(self, make_request(prompt, prompt_ids, **options))

    def generate_n(
        self,
        n: int,
        prompt: str | None = None,
        *,
        prompt_ids: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> list[Completion]:
        """Generate `n` completions side by side, each with a seed of its own.

        The first one's is the request's seed, or the one drawn for it. The first to fail ends all.

        Raises:
            As `generate`; BadRequest: n below 1.
        """
        with contextlib.ExitStack() as open_streams:
            streams = [
                open_streams.enter_context(self.stream(prompt, prompt_ids=prompt_ids, **one))
                for one in options_of_each(n, options)
            ]
            return [_drained(stream) for stream in streams]

    def status(self) -> dict[str, Any]:
        """What runs and how it does, as the coordinator sees it."""
        link = self._take()
        try:
            link.send(StatusRequest(request="status"))
            message = _recv_status(link)
        except BaseException:
            link.close()
            raise
        self._give(link)
        return parse_status(message)

    def close(self) -> None:
        """Close idle connections; streams that are open keep theirs until they end."""
        with self._lock:
            self._is_closed = True
            links, self._idle = self._idle, []
        for link in links:
            link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _take(self) -> ClientLink:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        link = ClientLink(self._address.endpoint, self._address.keys)
        try:
            link.connect()
            link.send(client_hello())
            check_welcome(link.recv(HELLO_S))
        except BaseException:
            link.close()
            raise
        return link

    def _give(self, link: ClientLink) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(link)
                return
        link.close()


class Stream:
    """One request in flight: iterate over its events, then read `completion`."""

    def __init__(self, client: Client, request: Request) -> None:
        submit = request.submit()
        self._client = client
        self._link: ClientLink | None = client._take()
        self._state = StreamState(submit.request, time.monotonic(), request.timeout_s)
        try:
            self._link.send(submit)
        except BaseException:
            self._drop()
            raise

    @property
    def completion(self) -> Completion:
        """The whole reply, once the iteration is over."""
        if self._state.completion is None:
            raise DFlashError("completion: the stream has not ended; iterate over it first")
        return self._state.completion

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
        link = self._link
        if link is not None:
            link.send(Cancel(request=self._state.request))

    def close(self) -> None:
        """Cancel if it still runs, and let go of the connection."""
        link = self._link
        if link is None:
            return
        if self._state.is_over:
            self._link = None
            self._client._give(link)
            return
        with contextlib.suppress(DFlashError):
            self.cancel()
        self._drop()

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

    def _next(self) -> Event | None:
        """Wait for one message, or for the moment when silence has to be judged."""
        if self._link is None:
            raise DFlashError("stream: it was closed before its end")
        message = self._recv(self._link)
        if message is not None:
            return self._state.on_message(message, time.monotonic())
        if self._state.on_time(time.monotonic()):
            self._link.send(StatusRequest(request=self._state.request))
        return None

    def _recv(self, link: ClientLink) -> Message | None:
        wait_s = max(0.0, self._state.next_deadline() - time.monotonic())
        try:
            return link.recv(wait_s)
        except PeerSilent:
            return None


def _recv_status(link: ClientLink) -> Status:
    """The next Status; what an earlier request left on the connection is passed over."""
    limit = time.monotonic() + STATUS_S
    while True:
        message = link.recv(max(0.0, limit - time.monotonic()))
        if isinstance(message, Status):
            return message
        if time.monotonic() > limit:
            raise WireError(f"StatusRequest: expected Status, got {type(message).__name__}")


def _drained(stream: Stream) -> Completion:
    for _ in stream:
        pass
    return stream.completion
