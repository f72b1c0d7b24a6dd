"""What a worker's links give to its compute thread, and how its waiting is ended.

Owns the inbox and the wake-up: a byte in a pipe, which any thread and signal handler may write.
Does not know sockets. Messages outward do not pass here: the thread that has one sends it.
"""

import os
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from common.net.links import Lost
from common.net.transport import Peer
from common.wire.messages import Message


@dataclass(frozen=True, slots=True)
class Stop:
    """The compute thread is to end with this exit code."""

    exit_code: int
    reason: str


Inward = tuple[Peer, Message | Lost] | Stop


class Handover:
    """Inbox and wake-up.

    Attributes:
        wake_fd: readable when the waiting thread should look.
    """

    def __init__(self) -> None:
        self._inbox: SimpleQueue[Inward] = SimpleQueue()
        self.wake_fd, self._wake_in = os.pipe()
        self._is_woken = False

    def put(self, item: Inward) -> None:
        """Queue something for the compute thread; from the thread that reads the links."""
        self._inbox.put(item)

    def take(self) -> Inward | None:
        """The oldest item, if there is one."""
        try:
            return self._inbox.get_nowait()
        except Empty:
            return None

    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return self._inbox.empty()

    def wake(self) -> None:
        """End the compute thread's waiting; after `put` from any other thread."""
        if not self._is_woken:
            self._is_woken = True
            os.write(self._wake_in, b"!")

    def clear(self) -> None:
        """Take the wake-up; for the waiting thread, when `wake_fd` is readable."""
        os.read(self.wake_fd, 64)
        self._is_woken = False

    def close(self) -> None:
        """Close the pipe, once nobody waits any more."""
        self._is_woken = True  # nobody writes any more
        os.close(self.wake_fd)
        os.close(self._wake_in)
