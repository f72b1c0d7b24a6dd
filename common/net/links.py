"""Non-blocking links: one ROUTER or one DEALER, its monitor and the codec, without a loop.

Owns the turn from frames to messages and from socket events to arrivals, and which connection a
routing id belongs to. Does not know event loops, who waits, or what a message means.

Reading belongs to one thread, sending to any: a lock makes each touch of the socket whole, and
whoever waits on `socket.FD` must look again when a send leaves `has_more` (the descriptor is
edge-triggered, and sending swallows edges). So a sender never has to wake another thread first,
which costs a thread's turn of the interpreter (0.5 ms) while Python code is busy.

How a ROUTER learns that a peer is gone: libzmq reports the file descriptor of each message and,
through the monitor, of each closed connection. A killed peer shows within about 2 ms.
"""

import threading
from dataclasses import dataclass
from typing import Final, NamedTuple

import zmq

from common.errors import WireError
from common.net.auth import AllowList, Keys
from common.net.sockets import (
    EVENTS,
    READABLE,
    REFUSALS,
    Context,
    Monitor,
    Socket,
    open_dealer,
    open_router,
)
from common.net.transport import Endpoint
from common.wire.codec import Frame, pack, unpack
from common.wire.messages import Message

# Plain ints: the enums' own arithmetic costs 10 us in each look.
_NOBLOCK: Final = int(zmq.NOBLOCK)
_NOBLOCK_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
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
    key: str = ""  # user id of that key: its role and name


class Gate:
    """One socket for several threads: every touch is whole, none blocks.

    Attributes:
        has_more: the last send left something to read.
    """

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._lock = threading.Lock()
        self.has_more = False

    def recv(self) -> list[zmq.Frame] | None:
        """The frames of one message, if one is there."""
        with self._lock:
            if not self._is_readable():
                return None
            frame = self._socket.recv(_NOBLOCK, copy=False)
            frames = [frame]
            while frame.more:
                frame = self._socket.recv(_NOBLOCK, copy=False)
                frames.append(frame)
            return frames

    def send(self, frames: list[Frame]) -> bool:
        """All frames or nothing; False: the peer is gone (EHOSTUNREACH), or at its mark."""
        with self._lock:
            if self._socket.closed:
                return False
            try:  # only the first frame can be refused; the rest follows it
                for frame in frames[:-1]:
                    self._socket.send(frame, _NOBLOCK_MORE)
                self._socket.send(frames[-1], _NOBLOCK)
            except zmq.ZMQError as fault:
                if fault.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                    return False
                raise
            finally:
                self.has_more = self._is_readable()
            return True

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; later sends return False."""
        with self._lock:
            self._socket.close(linger_ms)

    def _is_readable(self) -> bool:
        if self._socket.closed:
            return False
        return bool(int(self._socket.getsockopt(EVENTS)) & READABLE)


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
        self.gate = Gate(self.socket)
        self._allowed = allowed
        self._id_by_fd: dict[int, bytes] = {}

    def read(self) -> list[Received]:
        """Everything that came, in order, then who is gone; never blocks.

        A descriptor is given again soon after it was closed, so the end of an older connection may
        be told after the first message of the next one. Of a descriptor whose peer spoke for the
        first time in this look only the last event counts: its own acceptance stands behind every
        older end.
        """
        found: list[Received] = []
        fresh: set[int] = set()
        while len(found) < MAX_BATCH and (frames := self.gate.recv()):
            self._read_one(frames, found, fresh)
        last_event: dict[int, int] = {}
        for event, fd in self.monitor.events():
            if fd in fresh:
                last_event[fd] = event
            elif event == zmq.EVENT_DISCONNECTED:
                self._lose(fd, found)
        for fd, event in last_event.items():
            if event == zmq.EVENT_DISCONNECTED:
                self._lose(fd, found)
        return found

    def _read_one(self, frames: list[zmq.Frame], found: list[Received], fresh: set[int]) -> None:
        peer, last = frames[0].bytes, frames[-1]
        fd = int(last.get(zmq.SRCFD))
        former = self._id_by_fd.get(fd)
        if former != peer:
            if former is not None:  # the descriptor was closed and given again
                found.append(Received(former, Lost(), ""))
            self._id_by_fd[fd] = peer
            fresh.add(fd)
        role = key = ""
        if self.is_keyed and self._allowed is not None:
            key = str(last.get("User-Id"))
            role = self._allowed.role_of(key)
        found.append(Received(peer, _unpack(frames[1:]), role, key))

    def _lose(self, fd: int, found: list[Received]) -> None:
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
        return self.gate.send([peer, *frames])

    def close(self) -> None:
        """Close socket and monitor; what is not sent is lost."""
        self.monitor.close()
        self.gate.close()


class DealerLink:
    """A connecting DEALER. It reconnects by itself; each `Connected` is a new, unknown peer."""

    def __init__(
        self,
        context: Context,
        endpoint: Endpoint,
        keys: Keys | None,
        *,
        hwm: int,
        holds_until_up: bool = False,
    ) -> None:
        self.socket, self.monitor = open_dealer(
            context, endpoint, keys, hwm=hwm, holds_until_up=holds_until_up
        )
        self.gate = Gate(self.socket)
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
        while len(found) < MAX_BATCH and (frames := self.gate.recv()):
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
        return self.gate.send(frames)

    def close(self, linger_ms: int = 0) -> None:
        """Close socket and monitor; what is not sent in linger_ms is lost."""
        self.monitor.close()
        self.gate.close(linger_ms)


def _unpack(frames: list[zmq.Frame]) -> Message | WireError:
    """A message, or why it is none; tensor data stays in libzmq's buffer."""
    try:
        return unpack([frame.buffer for frame in frames])
    except WireError as fault:
        return fault
