"""Non-blocking links: one ROUTER or one DEALER, its monitor and the codec, without a loop.

Owns the turn from frames to messages and from socket events to arrivals, and which connection a
routing id belongs to. Does not know threads, event loops or what a message means. A link is used
by one thread; asyncio and threaded shells are put around it.

How a ROUTER learns that a peer is gone: libzmq reports the file descriptor of each message and,
through the monitor, of each closed connection. A killed peer shows within about 2 ms.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Final, NamedTuple

import zmq

from common.errors import WireError
from common.net.auth import AllowList, Keys
from common.net.sockets import REFUSALS, Context, Monitor, open_dealer, open_router, send_now
from common.net.transport import Endpoint
from common.wire.codec import Frame, pack, unpack
from common.wire.messages import Message

MAX_BATCH: Final = 256  # messages taken in one look, so that nobody starves the rest


@dataclass(frozen=True, slots=True)
class Connected:
    """The connection stands (first time, or again); the peer knows nothing of an earlier one."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection is gone; nothing more comes from this peer."""

    is_refused: bool = False  # the other side did not accept our key


Event = Message | WireError | Connected | Lost


class Received(NamedTuple):
    """What came from whom."""

    id: bytes  # routing id
    body: Message | WireError | Lost
    role: str  # of the sender's key; "" without CURVE, or when the key was revoked


class RouterLink:
    """A bound ROUTER.

    Attributes:
        address: where it listens, with the real port.
        is_keyed: whether senders' roles come from their keys.
    """

    def __init__(
        self,
        context: Context,
        address: str,
        keys: Keys | None,
        allowed: AllowList | None,
        *,
        hwm: int,
        is_insecure: bool = False,
    ) -> None:
        self.socket, self.address = open_router(
            context, address, keys, hwm=hwm, is_insecure=is_insecure
        )
        self.is_keyed = keys is not None and not address.startswith("ipc://")
        self.monitor = Monitor(self.socket)
        self._allowed = allowed
        self._id_by_fd: dict[int, bytes] = {}
        self._closed_before_told: Counter[int] = Counter()  # descriptors seen again meanwhile

    def read(self) -> list[Received]:
        """Everything that came, in order, then who is gone; never blocks."""
        found: list[Received] = []
        while len(found) < MAX_BATCH:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            self._read_one(frames, found)
        for event, fd in self.monitor.events():
            if event == zmq.EVENT_DISCONNECTED:
                self._lose(fd, found)
        return found

    def _read_one(self, frames: list[zmq.Frame], found: list[Received]) -> None:
        peer, last = frames[0].bytes, frames[-1]
        fd = int(last.get(zmq.SRCFD))
        former = self._id_by_fd.get(fd)
        if former != peer:
            if former is not None:  # the descriptor was closed and given again
                self._closed_before_told[fd] += 1
                found.append(Received(former, Lost(), ""))
            self._id_by_fd[fd] = peer
        role = ""
        if self.is_keyed and self._allowed is not None:
            role = self._allowed.role_of(str(last.get("User-Id")))
        found.append(Received(peer, _unpack(frames[1:]), role))

    def _lose(self, fd: int, found: list[Received]) -> None:
        if self._closed_before_told[fd] > 0:
            self._closed_before_told[fd] -= 1
            return
        peer = self._id_by_fd.pop(fd, None)
        if peer is not None:
            found.append(Received(peer, Lost(), ""))

    def send(self, peer: bytes, message: Message) -> bool:
        """Send at once, or not at all; False: the peer is gone or at its mark.

        Raises:
            WireError: the message cannot be packed.
        """
        return self.send_frames(peer, pack(message))

    def send_frames(self, peer: bytes, frames: list[Frame]) -> bool:
        """As `send`, for a message that is packed already."""
        return send_now(self.socket, [peer, *frames])

    def close(self) -> None:
        """Close socket and monitor; what is not sent is lost."""
        self.monitor.close()
        self.socket.close(0)


class DealerLink:
    """A connecting DEALER. It reconnects by itself; each `Connected` is a new, unknown peer."""

    def __init__(
        self, context: Context, endpoint: Endpoint, keys: Keys | None, *, hwm: int
    ) -> None:
        self.socket, self.monitor = open_dealer(context, endpoint, keys, hwm=hwm)
        self.is_up = False

    def read(self) -> list[Event]:
        """Connection events and messages since the last look; never blocks."""
        found: list[Event] = []
        self._read_messages(found)
        changes = self._changes()
        if changes:
            self._read_messages(found)  # what came before a loss goes before it
            found.extend(changes)
        return found

    def _read_messages(self, found: list[Event]) -> None:
        while len(found) < MAX_BATCH:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            found.append(_unpack(frames))

    def _changes(self) -> list[Event]:
        changes: list[Event] = []
        for event, _ in self.monitor.events():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_up = True
                changes.append(Connected())
            elif event in REFUSALS:
                self.is_up = False
                changes.append(Lost(is_refused=True))
            elif event == zmq.EVENT_DISCONNECTED and self.is_up:
                self.is_up = False
                changes.append(Lost())
        return changes

    def send(self, message: Message) -> bool:
        """Send at once, or not at all; False: not connected, or at the mark.

        Raises:
            WireError: the message cannot be packed.
        """
        return self.send_frames(pack(message))

    def send_frames(self, frames: list[Frame]) -> bool:
        """As `send`, for a message that is packed already."""
        return send_now(self.socket, frames)

    def close(self) -> None:
        """Close socket and monitor; what is not sent is lost."""
        self.monitor.close()
        self.socket.close(0)


def _unpack(frames: list[zmq.Frame]) -> Message | WireError:
    """A message, or why it is none; tensor data stays in libzmq's buffer."""
    try:
        return unpack([frame.buffer for frame in frames])
    except WireError as fault:
        return fault
