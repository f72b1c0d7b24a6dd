"""The seam between an actor and the shell that moves its messages.

Owns the words both sides use: endpoint, peer, send, actor. Does not know sockets or threads.
Invariant: an actor never blocks and never touches a socket; time is passed in (monotonic s).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from common.wire.messages import Message, Scalar

CONTROL_SOCKET: Final = "control.sock"  # the coordinator's, in the run folder
CONTROL_LINK: Final = "control"  # the coordinator, seen from a worker
DATA_LINK: Final = "data"  # drafters, seen from a target


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to connect, and whose key must answer there."""

    address: str  # "ipc:///path" or "tcp://host:port"
    server_key: str = ""  # CURVE public key, Z85; "" on ipc


@dataclass(frozen=True, slots=True)
class Peer:
    """Who a message came from, or goes to."""

    link: str  # CONTROL_LINK, DATA_LINK, or a target's data endpoint (seen from a drafter)
    id: bytes = b""  # routing id on ROUTER links, b"" on DEALER links


CONTROL_PEER: Final = Peer(CONTROL_LINK)


class Send(Protocol):
    """How an actor sends; given to it by its shell or mesh."""

    def __call__(self, peer: Peer, message: Message) -> bool:
        """Hand a message over without blocking; False: the peer is gone or at its mark."""
        ...


class Actor(Protocol):
    """A worker's logic without its sockets: target or drafter. All calls come from one thread."""

    def on_message(self, peer: Peer, message: Message, now: float) -> None:
        """Take one message."""
        ...

    def on_lost(self, peer: Peer, now: float) -> None:
        """The connection is gone; nothing more comes from this peer."""
        ...

    def work(self, now: float) -> bool:
        """Do one bounded piece of background work; True: there is more."""
        ...

    def next_deadline(self) -> float | None:
        """When `on_time` wants to be called, in monotonic seconds."""
        ...

    def on_time(self, now: float) -> None:
        """A deadline named by `next_deadline` has come."""
        ...

    def heartbeat(self) -> tuple[str, int, Mapping[str, Scalar]]:
        """State, sessions and counters; cheap, called from any thread."""
        ...


class Shell(Protocol):
    """What an actor may ask of the shell around it; `WorkerShell` and `MeshShell` are the two."""

    @property
    def send(self) -> Send:
        """Hand a message over; see `Send`."""
        ...

    def dial(self, endpoint: str, server_key: str) -> Peer:
        """Open, or reuse, the data link to a target."""
        ...

    def hang_up(self, peer: Peer) -> None:
        """Close a data link that `dial` opened; no `on_lost` follows."""
        ...
