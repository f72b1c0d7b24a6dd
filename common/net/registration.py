"""A worker's standing with the coordinator: Hello, Welcome, Ready, heartbeats, goodbye.

Owns the control DEALER after it is open. Does not know data links, sessions or threads; the I/O
thread calls it. A connection that comes back is a new peer to the coordinator, so Hello and Ready
are said again and the actor is told that its sessions are gone.
Invariant: Hello is the first message on every connection.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Final

import psutil
import zmq

from common.errors import BY_CODE, KeyFault
from common.net.handover import Handover, Stop
from common.net.links import Connected, DealerLink, Event, Lost
from common.net.transport import CONTROL_LINK, Peer
from common.wire.messages import Bye, Heartbeat, Hello, Message, Ready, Reject, Scalar, Welcome

logger = logging.getLogger(__name__)

LAST_WORDS_MS: Final = 500  # how long a goodbye may take
CONTROL_PEER: Final = Peer(CONTROL_LINK)

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
        self._ready: Ready | None = None
        self._is_ready_said = False
        self.next_beat = 0.0  # monotonic seconds

    def handle(self, event: Event) -> bool:
        """Deal with what concerns the registration; False: it is for the actor."""
        match event:
            case Connected():
                self._handover.live.add(CONTROL_PEER)
                self._register()
            case Lost(is_refused=True):
                text = "the coordinator does not accept our key"
                self._handover.inbox.put(Stop(KeyFault.exit_code, text))
            case Lost():
                self._handover.lose(CONTROL_PEER)
            case Welcome(heartbeat_ms=period):
                self._heartbeat_s = max(period, 1) / 1000
                self.next_beat = 0.0
                self._say_ready()
            case Reject():
                self._on_reject(event)
            case Bye(reason=reason):
                self._handover.inbox.put(Stop(0, f"the coordinator said goodbye: {reason}"))
            case Heartbeat():
                pass
            case _:
                return False
        return True

    def say(self, message: Message) -> None:
        """Send a report if there is a connection; a Ready is kept for the next one."""
        if isinstance(message, Ready):
            self._ready = message
            self._is_ready_said = False
            self._say_ready()
        elif CONTROL_PEER in self._handover.live:
            self.link.send(message)

    def on_time(self, now: float) -> None:
        """Send the heartbeat that is due."""
        if now < self.next_beat:
            return
        self.next_beat = now + self._heartbeat_s
        if CONTROL_PEER in self._handover.live:
            state, n_sessions, age_s, counters = self._beat()
            rss_bytes = self._process.memory_info().rss
            self.link.send(Heartbeat(state, n_sessions, age_s * 1000, rss_bytes, counters))

    def beat_now(self) -> None:
        """Let the next heartbeat be due at once."""
        self.next_beat = 0.0

    def leave(self, last_words: str) -> None:
        """Say Bye and let the socket linger for it."""
        if CONTROL_PEER in self._handover.live:
            self.link.socket.setsockopt(zmq.LINGER, LAST_WORDS_MS)
            self.link.send(Bye(last_words))

    def _register(self) -> None:
        self._is_ready_said = False
        self.link.send(self._hello())

    def _say_ready(self) -> None:
        if self._ready and not self._is_ready_said and CONTROL_PEER in self._handover.live:
            self._is_ready_said = self.link.send(self._ready)

    def _on_reject(self, reject: Reject) -> None:
        kind = BY_CODE.get(reject.code)
        if kind is not None and not kind.retryable:
            text = f"the coordinator refused us: {reject.message}"
            self._handover.inbox.put(Stop(kind.exit_code, text))
            return
        logger.warning("not registered (%s): %s; registering again", reject.code, reject.message)
        self._handover.inbox.put((CONTROL_PEER, Lost()))  # it knows nothing of our sessions
        self._register()
