"""The client for plain Python: one call, one reply, or a stream of events.

Owns the verbs. Does not know connections (`pool`), how a request in flight is followed (`inflight`,
`stream`) or checked (`request`).
Invariant: a `Client` may be used from several threads; a `Stream` from one, and `cancel` from any.
"""

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from common.errors import DFlashError, WireError
from common.net.zeromq import ClientLink
from common.sdk.inflight import Stream
from common.sdk.locate import locate
from common.sdk.looks import Health, ModelInfo, health_of, models_of, stats_of
from common.sdk.options import Options, options_of_each
from common.sdk.pool import Pool
from common.sdk.request import make_request
from common.sdk.stream import Completion, parse_status
from common.wire.messages import Status, StatusRequest

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
        self._pool = Pool(locate(name, run_dir, file, endpoint))
        self._timeout_s = timeout_s

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
    ) -> Stream:
        """Generate and yield events as they come; leaving the loop early cancels."""
        options.setdefault("timeout_s", self._timeout_s)
        return Stream(self._pool, make_request(prompt, prompt_ids, **options))

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
            return _drained_together(streams)

    def status(self) -> dict[str, Any]:
        """What runs and how it does, as the coordinator sees it."""
        link = self._pool.take()
        try:
            link.send(StatusRequest(request="status"))
            message = _recv_status(link)
        except BaseException:
            link.close()
            raise
        self._pool.give(link)
        return parse_status(message)

    def health(self) -> Health:
        """Whether requests are served, and by whom."""
        return health_of(self.status())

    def models(self) -> list[ModelInfo]:
        """What the ready targets serve; empty while none is ready."""
        return models_of(self.status())

    def stats(self) -> dict[str, Any]:
        """`requests` by how they ended, and the counters of all `workers`, since the start."""
        return stats_of(self.status())

    def close(self) -> None:
        """Close idle connections; streams that are open keep theirs until they end."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


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


def _drained_together(streams: Sequence[Stream]) -> list[Completion]:
    """Read all at the same pace: one that is not read would be paused, and given up at last."""
    with ThreadPoolExecutor(len(streams)) as readers:
        replies = [readers.submit(_drained, stream) for stream in streams]
        try:
            done, _ = wait(replies, return_when=FIRST_EXCEPTION)
            for reply in done:
                reply.result()
        except BaseException:
            for stream in streams:
                with contextlib.suppress(DFlashError):
                    stream.cancel()
            raise
        return [reply.result() for reply in replies]
