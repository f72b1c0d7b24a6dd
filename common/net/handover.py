"""The hand-over between a worker's compute thread and its I/O thread.

Owns the two queues, the wake-up, and the set of peers to which a send may succeed. Does not know
sockets. Inward a SimpleQueue; outward a deque and a byte in a pipe, which any thread may write.
Invariant: what is posted and ordered is taken in that order.
"""

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final

from common.net.links import Lost
from common.net.transport import Peer
from common.wire.codec import Frame
from common.wire.messages import Message

MAX_BEHIND: Final = 256  # messages held for one peer that is at its mark, or not connected yet


@dataclass(frozen=True, slots=True)
class Stop:
    """The compute thread is to end with this exit code."""

    exit_code: int
    reason: str


Inward = tuple[Peer, Message | Lost] | Stop
Outward = tuple[Peer, list[Frame]] | Callable[[], None]


class Handover:
    """Both queues.

    Attributes:
        inbox: what the compute thread takes.
        live: peers that are not known to be gone; written by the I/O thread and by `dial`.
        behind: messages not yet taken by a live peer's socket, in order.
    """

    def __init__(self) -> None:
        self.inbox: SimpleQueue[Inward] = SimpleQueue()
        self.live: set[Peer] = set()
        self.behind: dict[Peer, deque[list[Frame]]] = {}
        self._outbox: deque[Outward] = deque()
        self.wake_fd, self._wake_in = os.pipe()
        self._is_woken = False

    def post(self, peer: Peer, frames: list[Frame]) -> bool:
        """Hand frames to the I/O thread; False: the peer is gone, or MAX_BEHIND messages behind."""
        if peer not in self.live or len(self.behind.get(peer, ())) >= MAX_BEHIND:
            return False
        self._outbox.append((peer, frames))
        self._wake()
        return True

    def order(self, call: Callable[[], None]) -> None:
        """Let the I/O thread do something, after what was posted before."""
        self._outbox.append(call)
        self._wake()

    def take(self, *, is_woken: bool) -> list[Outward]:
        """What was posted and ordered; for the I/O thread, `is_woken` when the pipe has a byte."""
        if is_woken:
            os.read(self.wake_fd, 64)
            self._is_woken = False  # before the queue is read: what comes now wakes again
        taken = []
        while self._outbox:
            taken.append(self._outbox.popleft())
        return taken

    def lose(self, peer: Peer) -> None:
        """The connection is gone: drop what was for it and tell the compute thread."""
        self.behind.pop(peer, None)
        if peer in self.live:
            self.live.discard(peer)
            self.inbox.put((peer, Lost()))

    def close(self) -> None:
        """Close the pipe; for the I/O thread, at its end."""
        self._is_woken = True  # nobody writes any more
        os.close(self.wake_fd)
        os.close(self._wake_in)

    def _wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            os.write(self._wake_in, b"!")
