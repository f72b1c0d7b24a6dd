"""Links on an event loop or in a plain thread: the coordinator's ROUTER, and clients' DEALERs.

Owns waiting. Does not know what messages mean. zmq's descriptors are edge-triggered: they fire
once per change, and any send or receive may swallow the change; so every look drains the link,
and every send is followed by a look.
Invariant: every wait has a deadline or ends with `close`; nothing is queued for a lost peer.
"""

import asyncio
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Self

import zmq

from common.net.auth import AllowList, Authenticator, Keys
from common.net.inbox import Inbox
from common.net.links import MAX_BATCH, DealerLink, Received, RouterLink
from common.net.sockets import HWM, Context
from common.net.transport import Endpoint
from common.wire.messages import Message

MAX_WAITING: Final = 4096  # received and not yet taken; above it sockets are not read
CONNECT_S: Final = 5.0
SLICE_S: Final = 0.05  # a swallowed edge is found within this


class AsyncRouter:
    """One or more bound ROUTERs, read as one; belongs to one running event loop.

    Routing ids are prefixed with the number of the socket, so that they never collide.
    """

    def __init__(self, *, hwm: int = HWM) -> None:
        self._context: Context = zmq.Context()
        self._hwm = hwm
        self._links: list[RouterLink] = []
        self._authenticator: Authenticator | None = None
        self._waiting: deque[Received] = deque()
        self._has_some = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._is_closed = False

    def bind(self, address: str, keys: Keys | None = None, *, is_insecure: bool = False) -> str:
        """Listen on an ipc or tcp address as well; tcp needs keys.

        Returns:
            The address, with the real port.

        Raises:
            AddressInUse, ConfigError, KeyFault: see `sockets.open_router`.
        """
        is_keyed = keys is not None and not address.startswith("ipc://")
        allowed = AllowList(keys.folder) if keys is not None and is_keyed else None
        if allowed is not None and self._authenticator is None:
            self._authenticator = Authenticator(self._context, allowed)
        link = RouterLink(
            self._context, address, keys, allowed, hwm=self._hwm, is_insecure=is_insecure
        )
        self._links.append(link)
        for socket in (link.socket, link.monitor.socket):
            self._loop.add_reader(socket.FD, self._look)
        self._loop.call_soon(self._look)
        return link.address

    async def recv(self) -> Received:
        """The next message, bad message or loss; waits until there is one."""
        while not self._waiting:
            self._has_some.clear()
            self._look()
            if not self._waiting:
                await self._has_some.wait()
        return self._waiting.popleft()

    def take_waiting(self) -> list[Received]:
        """Everything that has come by now; for a look at the clock that must not be unfair."""
        taken: list[Received] = []
        self._look()
        while self._waiting:
            taken.append(self._waiting.popleft())
            self._look()
        return taken

    def send(self, peer: bytes, message: Message) -> bool:
        """Send at once, or not at all; False: the peer is gone or at its mark.

        Raises:
            WireError: the message cannot be packed.
        """
        if self._is_closed or not peer or peer[0] >= len(self._links):
            return False
        link = self._links[peer[0]]
        is_sent = link.send(peer[1:], message)
        if link.gate.has_more:
            self._loop.call_soon(self._look)
        return is_sent

    def _look(self) -> None:
        if self._is_closed:
            return
        for number, link in enumerate(self._links):
            if len(self._waiting) >= MAX_WAITING:
                break
            found = link.read()
            prefix = bytes((number,))
            self._waiting.extend(one._replace(id=prefix + one.id) for one in found)
            if len(found) >= MAX_BATCH:
                self._loop.call_soon(self._look)
        if self._waiting:
            self._has_some.set()

    def close(self) -> None:
        """Close every socket; a waiting `recv` stays waiting, so cancel its task first."""
        if self._is_closed:
            return
        self._is_closed = True
        for link in self._links:
            for socket in (link.socket, link.monitor.socket):
                self._loop.remove_reader(socket.FD)
            link.close()
        if self._authenticator is not None:
            self._authenticator.close()
        self._context.destroy(linger=0)


class ClientLink:
    """A DEALER for plain threads: any thread may send; one at a time may receive.

    A lost connection ends the link: registration does not survive a reconnect, so open a new one.
    """

    def __init__(self, endpoint: Endpoint, keys: Keys | None = None) -> None:
        self._context: Context = zmq.Context()
        self._lock = threading.Lock()
        self._inbox = Inbox(endpoint.address)
        try:
            self._link = DealerLink(self._context, endpoint, keys, hwm=HWM)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def connect(self, timeout_s: float = CONNECT_S) -> Self:
        """Wait until the connection stands.

        Raises:
            NotReady: nobody answered in time.
            AuthRefused: the other side does not accept our key.
        """
        self._wait(lambda: self._link.is_up, timeout_s)
        if not self._link.is_up:
            raise self._inbox.not_ready(timeout_s)
        return self

    def send(self, message: Message) -> None:
        """Send at once.

        Raises:
            PeerLost: the connection is gone, or the other side takes nothing more.
            WireError: the message cannot be packed.
        """
        with self._lock:
            self._look()
            self._inbox.check()
            if not self._link.send(message):
                raise self._inbox.not_taken()
            if self._link.gate.has_more:
                self._look()

    def recv(self, timeout_s: float) -> Message:
        """The next message.

        Raises:
            PeerSilent: none came in time.
            PeerLost: the connection is gone.
            WireError: what came is no message; the link lives on.
        """
        self._wait(lambda: len(self._inbox) > 0, timeout_s)
        with self._lock:
            return self._inbox.take(timeout_s)

    def close(self) -> None:
        """Close the connection; safe to call twice."""
        with self._lock:
            if not self._context.closed:
                self._inbox.end()
                self._link.close()
                self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        """Look until done, a fault with nothing left to take, or the time is up."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._look()
                if is_done():
                    return
                self._inbox.check()
                poll = select.poll()
                for socket in (self._link.socket, self._link.monitor.socket):
                    poll.register(socket.FD, select.POLLIN)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            poll.poll(min(left_s, SLICE_S) * 1000)

    def _look(self) -> None:
        """Read what there is; the lock is held."""
        if not self._context.closed:
            self._inbox.put(self._link.read())


class AsyncClientLink:
    """A DEALER on the running event loop; one task at a time may receive."""

    def __init__(self, endpoint: Endpoint, keys: Keys | None = None) -> None:
        self._context: Context = zmq.Context()
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._inbox = Inbox(endpoint.address)
        try:
            self._link = DealerLink(self._context, endpoint, keys, hwm=HWM)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        for socket in (self._link.socket, self._link.monitor.socket):
            self._loop.add_reader(socket.FD, self._look)

    async def connect(self, timeout_s: float = CONNECT_S) -> Self:
        """As `ClientLink.connect`."""
        await self._wait(lambda: self._link.is_up, timeout_s)
        if not self._link.is_up:
            raise self._inbox.not_ready(timeout_s)
        return self

    def send(self, message: Message) -> None:
        """As `ClientLink.send`; does not wait."""
        self._look()
        self._inbox.check()
        if not self._link.send(message):
            raise self._inbox.not_taken()
        if self._link.gate.has_more:
            self._loop.call_soon(self._look)

    async def recv(self, timeout_s: float) -> Message:
        """As `ClientLink.recv`."""
        await self._wait(lambda: len(self._inbox) > 0, timeout_s)
        return self._inbox.take(timeout_s)

    def close(self) -> None:
        """Close the connection; safe to call twice."""
        if self._context.closed:
            return
        self._inbox.end()
        for socket in (self._link.socket, self._link.monitor.socket):
            self._loop.remove_reader(socket.FD)
        self._link.close()
        self._context.destroy(linger=0)
        self._changed.set()

    async def _wait(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        """As `ClientLink._wait`."""
        deadline = self._loop.time() + timeout_s
        while True:
            self._changed.clear()
            self._look()
            if is_done():
                return
            self._inbox.check()
            left_s = deadline - self._loop.time()
            if left_s <= 0:
                return
            timer = self._loop.call_later(left_s, self._changed.set)
            try:
                await self._changed.wait()
            finally:
                timer.cancel()

    def _look(self) -> None:
        if self._context.closed:
            return
        found = self._link.read()
        self._inbox.put(found)
        if found:
            self._changed.set()
            self._loop.call_soon(self._look)  # there may be more than one batch
