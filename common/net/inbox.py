"""What a client's link received and nobody took yet, and the fault that ended it.

Owns the turn from link events to messages and exceptions. Does not know sockets, threads or loops.
Invariant: messages that came before a loss are taken before the loss is raised.
"""

from collections import deque
from collections.abc import Sequence

from common.errors import AuthRefused, NotReady, PeerLost, PeerSilent, WireError
from common.net.links import Connected, Event, Lost
from common.wire.messages import Message


class Inbox:
    """Messages in order.

    Attributes:
        fault: why nothing more comes; None while the link lives.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._waiting: deque[Message | WireError] = deque()
        self.fault: AuthRefused | PeerLost | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, events: Sequence[Event]) -> None:
        """Queue messages; remember the first loss."""
        for event in events:
            if isinstance(event, Lost):
                self.fault = self.fault or self._loss(event)
            elif not isinstance(event, Connected):
                self._waiting.append(event)

    def take(self, timeout_s: float) -> Message:
        """The next message, after waiting for timeout_s.

        Raises:
            WireError: what came is no message.
            PeerSilent: nothing came.
        """
        if not self._waiting:
            raise PeerSilent(f"{self._address}: expected a message in {timeout_s:g} s, got none")
        event = self._waiting.popleft()
        if isinstance(event, WireError):
            raise event
        return event

    def end(self) -> None:
        """Our own side closed the link."""
        self.fault = self.fault or PeerLost(f"{self._address}: expected an open link, it is closed")

    def check(self) -> None:
        """Raise the fault, if there is one."""
        if self.fault is not None:
            raise self.fault

    def not_taken(self) -> PeerLost:
        """The error of a send that could not be done at once."""
        return PeerLost(f"{self._address}: not connected, or it takes nothing more")

    def not_ready(self, timeout_s: float) -> NotReady:
        """The error of a connection that did not come about."""
        return NotReady(
            f"{self._address}: expected an answer in {timeout_s:g} s, got none; is it running?"
        )

    def _loss(self, lost: Lost) -> AuthRefused | PeerLost:
        if lost.is_refused:
            return AuthRefused(
                f"{self._address}: expected our key to be accepted, got a refusal; "
                "is it in the other side's keys.d, and is the server key right?"
            )
        return PeerLost(f"{self._address}: the connection is gone; open a new one")
