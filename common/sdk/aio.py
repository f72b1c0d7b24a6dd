"""The client for asyncio: the same verbs as `client`, awaited.

Owns the verbs. Does not know connections and requests in flight (`aio_inflight`), how a request is
followed (`stream`) or checked (`request`).
Invariant: a client and its streams belong to one event loop.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from common.errors import WireError
from common.net.zeromq import AsyncClientLink
from common.sdk.aio_inflight import AsyncPool, AsyncStream
from common.sdk.client import STATUS_S
from common.sdk.locate import locate
from common.sdk.looks import Health, ModelInfo, health_of, models_of, stats_of
from common.sdk.options import Options, options_of_each
from common.sdk.request import make_request
from common.sdk.stream import Completion, parse_status
from common.wire.messages import Status, StatusRequest


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
        self._pool = AsyncPool(locate(name, run_dir, file, endpoint))
        self._timeout_s = timeout_s

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
    ) -> AsyncStream:
        """As `Client.stream`; the request is sent when the iteration begins."""
        options.setdefault("timeout_s", self._timeout_s)
        return AsyncStream(self._pool, make_request(prompt, prompt_ids, **options))

    async def generate_n(
        self,
        n: int,
        prompt: str | None = None,
        *,
        prompt_ids: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> list[Completion]:
        """As `Client.generate_n`."""
        jobs = [
            asyncio.ensure_future(self.generate(prompt, prompt_ids=prompt_ids, **one))
            for one in options_of_each(n, options)
        ]
        try:
            return await asyncio.gather(*jobs)
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    async def status(self) -> dict[str, Any]:
        """What runs and how it does, as the coordinator sees it."""
        link = await self._pool.take()
        try:
            link.send(StatusRequest(request="status"))
            message = await _recv_status(link)
        except BaseException:
            link.close()
            raise
        self._pool.give(link)
        return parse_status(message)

    async def health(self) -> Health:
        """As `Client.health`."""
        return health_of(await self.status())

    async def models(self) -> list[ModelInfo]:
        """As `Client.models`."""
        return models_of(await self.status())

    async def stats(self) -> dict[str, Any]:
        """As `Client.stats`."""
        return stats_of(await self.status())

    async def aclose(self) -> None:
        """Close idle connections; streams that are open keep theirs until they end."""
        await self._pool.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()


async def _recv_status(link: AsyncClientLink) -> Status:
    """The next Status; what an earlier request left on the connection is passed over."""
    limit = time.monotonic() + STATUS_S
    while True:
        message = await link.recv(max(0.0, limit - time.monotonic()))
        if isinstance(message, Status):
            return message
        if time.monotonic() > limit:
            raise WireError(f"StatusRequest: expected Status, got {type(message).__name__}")
