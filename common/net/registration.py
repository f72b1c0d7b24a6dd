"""A worker's standing with the coordinator: Hello, Welcome, Ready, heartbeats, goodbye.

Owns the control DEALER after it is open. Does not know data links or sessions. `handle` is called
by the thread that reads, the rest by any. A connection that comes back is a new peer to the
coordinator, so Hello and Ready are said again and the actor is told that its sessions are gone.
Invariant: Hello is the first message on every connection.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

import psutil

from common.errors import BY_CODE, KeyFault
from common.net.handover import Handover, Stop
from common.net.links import Connected, DealerLink, Event, Lost
from common.net.transport import CONTROL_PEER
from common.wire.codec import Frame
from common.wire.messages import Bye, Heartbeat, Hello, Message, Ready, Reject, Scalar, Welcome

logger = logging.getLogger(__name__)

LAST_WORDS_MS: Final = 500  # how long a goodbye may take
RETRY_S: Final = 0.2  # before another Hello after a Reject, so that two sides never spin

Beat = Callable[[], tuple[str, int, float, Mapping[str, Scalar]]]  # state, sessions, age s, counts


class Registration:
    """The control side of a worker."""

    def __init__(
        self,
        link: DealerLink,
        handover: Handover,
        hello: Callable[[], Hello],
        beat: Beat,
        heartbeat_s: float,
    ) -> None:
        self.link = link
        self._handover = handover
        self._hello = hello
        self._beat = beat
        self._heartbeat_s = heartbeat_s
        self._process = psutil.Process()
        self._speaking = threading.RLock()  # a report must not fall between a Hello and its note
        self._has_greeted = False
        self._ready: Ready | None = None
        self._is_ready_said = False
        self._linger_ms = 0
        self._greet_at = float("inf")  # monotonic seconds; when to say Hello again after a Reject
        self.next_beat = 0.0  # monotonic seconds

    def send(self, frames: list[Frame]) -> bool:
        """Send to the coordinator, from any thread; False: not connected, or at the mark."""
        return self._has_greeted and self.link.send_frames(frames)

    def handle(self, event: Event) -> bool:
        """Deal with what concerns the registration; False: it is for the actor."""
        match event:
            case Connected():
                self._greet()
            case Lost(is_refused=True):
                text = "the coordinator does not accept our key"
                self._handover.put(Stop(KeyFault.exit_code, text))
            case Lost():
                self._has_greeted = False
                self._handover.put((CONTROL_PEER, event))
            case Welcome(heartbeat_ms=period):
                self._heartbeat_s = max(period, 1) / 1000
                self.next_beat = 0.0
                self._say_ready()
            case Reject():
                self._on_reject(event)
            case Bye(reason=reason):
                self._handover.put(Stop(0, f"the coordinator said goodbye: {reason}"))
            case Heartbeat():
                pass
            case _:
                return False
        return True

    def say(self, message: Message) -> None:
        """Send a report if there is a connection; a Ready is kept for the next one."""
        with self._speaking:
            if isinstance(message, Ready):
                self._ready = message
                self._is_ready_said = False
                self._say_ready()
            elif self._has_greeted:
                self.link.send(message)

    def on_time(self, now: float) -> None:
        """Send the heartbeat that is due."""
        if now >= self._greet_at:
            self._greet()
        if now < self.next_beat:
            return
        self.next_beat = now + self._heartbeat_s
        if self._has_greeted:
            state, n_sessions, age_s, counters = self._beat()
            rss_bytes = self._process.memory_info().rss
            self.link.send(Heartbeat(state, n_sessions, age_s * 1000, rss_bytes, counters))

    def beat_now(self) -> None:
        """Let the next heartbeat be due at once."""
        self.next_beat = 0.0

    def leave(self, last_words: str) -> None:
        """Say Bye, and let the socket linger for it when it closes."""
        if self._has_greeted and self.link.send(Bye(last_words)):
            self._linger_ms = LAST_WORDS_MS
        self._has_greeted = False

    def close(self) -> None:
        """Close the control socket."""
        self.link.close(self._linger_ms)

    def _greet(self) -> None:
        with self._speaking:
            self._greet_at = float("inf")
            self._is_ready_said = False
            self._has_greeted = self.link.send(self._hello())

    def _say_ready(self) -> None:
        with self._speaking:
            if self._ready is not None and self._has_greeted and not self._is_ready_said:
                self._is_ready_said = self.link.send(self._ready)

    def _on_reject(self, reject: Reject) -> None:
        kind = BY_CODE.get(reject.code)
        if kind is not None and not kind.retryable:
            text = f"the coordinator refused us: {reject.message}"
            self._handover.put(Stop(kind.exit_code, text))
            return
        if self._greet_at < float("inf"):
            return  # several messages crossed the first Reject
        logger.warning("not registered (%s): %s; trying again", reject.code, reject.message)
        self._handover.put((CONTROL_PEER, Lost()))  # it knows nothing of our sessions
        self._has_greeted = False
        self._greet_at = time.monotonic() + RETRY_S
