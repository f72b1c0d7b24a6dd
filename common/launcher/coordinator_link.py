"""What the launcher asks of the coordinator, as the administrator of the run.

Owns the calls, their deadlines and the connection behind them. Does not know processes.
Invariant: no call raises because the coordinator is gone; each says so in its answer.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from common.errors import DFlashError, PeerSilent, WireError
from common.net.zeromq import AsyncClientLink
from common.sdk.locate import Address
from common.sdk.request import HELLO_S, check_welcome, client_hello
from common.sdk.stream import parse_status
from common.wire.messages import (
    Bye,
    Drain,
    Drained,
    Failed,
    Message,
    Reject,
    Status,
    StatusRequest,
    WorkerExited,
)

STATUS_S: Final = 2.0  # the coordinator answers between two messages; it does no heavy work
CONNECT_S: Final = 1.0
READ_S: Final = 3600.0  # one look; the reader looks again


class CoordinatorLink(Protocol):
    """What the supervisor asks of the coordinator; every call ends within its time."""

    async def status(self) -> Mapping[str, Any] | None:
        """The coordinator's Status, or None when it does not answer."""
        ...

    async def exited(self, name: str, reason: str) -> None:
        """Tell it that a worker's process is gone."""
        ...

    async def drain(self, name: str, timeout_s: float) -> bool:
        """Drain one worker; False: not done in time."""
        ...


class AdminLink:
    """A `CoordinatorLink` over a socket; connects when first used, and again after a loss."""

    def __init__(self, address: Callable[[], Address]) -> None:
        self._address = address
        self._link: AsyncClientLink | None = None
        self._reader: asyncio.Task[None] | None = None
        self._answers: dict[str, asyncio.Future[Message]] = {}
        self._connecting = asyncio.Lock()
        self._numbers = itertools.count(1)

    async def status(self) -> Mapping[str, Any] | None:
        """See `CoordinatorLink.status`."""
        name = f"status-{next(self._numbers)}"
        answer = await self._ask(StatusRequest(request=name), name, STATUS_S)
        return parse_status(answer) if isinstance(answer, Status) else None

    async def exited(self, name: str, reason: str) -> None:
        """See `CoordinatorLink.exited`."""
        with contextlib.suppress(DFlashError):
            link = await self._connect()
            link.send(WorkerExited(name=name, reason=reason))

    async def drain(self, name: str, timeout_s: float) -> bool:
        """See `CoordinatorLink.drain`."""
        answer = await self._ask(Drain(name=name), name, timeout_s)
        return isinstance(answer, Drained)

    def close(self) -> None:
        """Close the connection."""
        self._drop()

    async def _ask(self, message: Message, key: str, timeout_s: float) -> Message | None:
        try:
            link = await self._connect()
            answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
            self._answers[key] = answer
            link.send(message)
            return await asyncio.wait_for(answer, timeout_s)
        except (DFlashError, TimeoutError):
            return None
        finally:
            self._answers.pop(key, None)

    async def _connect(self) -> AsyncClientLink:
        async with self._connecting:
            if self._link is None:
                address = self._address()
                link = AsyncClientLink(address.endpoint, address.keys)
                try:
                    await link.connect(CONNECT_S)
                    link.send(client_hello("admin", "launcher"))
                    check_welcome(await link.recv(HELLO_S))
                except BaseException:
                    link.close()
                    raise
                self._link = link
                self._reader = asyncio.get_running_loop().create_task(self._read(link))
            return self._link

    async def _read(self, link: AsyncClientLink) -> None:
        """Hand answers to whoever asked, until the connection is gone."""
        while True:
            try:
                message = await link.recv(READ_S)
            except (PeerSilent, WireError):
                continue
            except DFlashError:
                break
            match message:
                case Status():
                    self._answer(message.request, message)
                case Drained() | Failed():
                    self._answer(message.name, message)
                case Bye() | Reject():
                    break
                case _:
                    pass
        if self._link is link:
            self._drop()

    def _answer(self, key: str, message: Message) -> None:
        future = self._answers.get(key)
        if future is not None and not future.done():
            future.set_result(message)

    def _drop(self) -> None:
        link, self._link = self._link, None
        reader, self._reader = self._reader, None
        if link is not None:
            link.close()
        if reader is not None and reader is not asyncio.current_task():
            reader.cancel()
        for future in self._answers.values():
            if not future.done():
                future.set_exception(PeerSilent("coordinator: the connection is gone"))
