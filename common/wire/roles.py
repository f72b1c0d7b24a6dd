"""Which role may send which message on which plane.

Owns the table. Does not know keys, sockets or registrations: the role is passed in.
Invariant: every message of TYPE_NUMBERS has at least one sender on one plane.
"""

from typing import Final

from common.errors import AuthRefused
from common.wire.messages import (
    Accepted,
    Attach,
    Block,
    Bye,
    Cancel,
    Close,
    Done,
    Draft,
    Drafted,
    DraftFailed,
    Drain,
    Drained,
    Failed,
    Features,
    Heartbeat,
    Hello,
    Link,
    LinkLost,
    LinkRefused,
    Message,
    Open,
    Opened,
    Order,
    Prefilled,
    PrefillProgress,
    Progress,
    Read,
    Ready,
    Reject,
    Renew,
    Report,
    Resync,
    Status,
    StatusRequest,
    Submit,
    Tokens,
    Verified,
    Verify,
    Welcome,
    WorkerExited,
)

TARGET: Final = "target"
DRAFTER: Final = "drafter"
CLIENT: Final = "client"
ADMIN: Final = "admin"
COORDINATOR: Final = "coordinator"
LAUNCHER: Final = "launcher"
ROLES: Final = (TARGET, DRAFTER, CLIENT, ADMIN, COORDINATOR)  # what a key may be given

CONTROL: Final = "control"  # the star around the coordinator
DATA: Final = "data"  # drafter <-> target
LAUNCH: Final = "launch"  # command line <-> launcher, on the run directory's own socket

_Kinds = frozenset[type[Message]]
_JOIN: Final[_Kinds] = frozenset({Hello, Bye})
_WORK: Final[_Kinds] = _JOIN | {Progress, Ready, Heartbeat, LinkLost, Failed}
_ASK: Final[_Kinds] = _JOIN | {Submit, Cancel, Read, StatusRequest}

MAY_SEND: Final[dict[tuple[str, str], _Kinds]] = {
    (CONTROL, TARGET): _WORK | {Opened, PrefillProgress, Prefilled, Verified, Drafted, DraftFailed},
    (CONTROL, DRAFTER): _WORK | {Drafted, DraftFailed},
    (CONTROL, CLIENT): _ASK,
    (CONTROL, ADMIN): _ASK | {Drain, WorkerExited},
    (CONTROL, COORDINATOR): frozenset(
        {Welcome, Reject, Heartbeat, Bye, Drain, Drained, Accepted, PrefillProgress, Tokens}
        | {Done, Failed, Open, Attach, Renew, Close, Draft, Verify, Status}
    ),
    (DATA, DRAFTER): frozenset({Link, Resync, Block, Bye}),
    (DATA, TARGET): frozenset({LinkRefused, Features, Bye}),
    (LAUNCH, ADMIN): frozenset({Order}),
    (LAUNCH, LAUNCHER): frozenset({Report}),
}


def may_send(plane: str, role: str, kind: type[Message]) -> bool:
    """Whether `role` may send a message of this class on `plane`; unknown names may nothing."""
    return kind in MAY_SEND.get((plane, role), frozenset())


def check_sender(plane: str, role: str, message: Message) -> None:
    """Refuse a message that its sender's role does not cover.

    Raises:
        AuthRefused: names message, role and plane.
    """
    if not may_send(plane, role, type(message)):
        allowed = sorted(name for where, name in MAY_SEND if where == plane)
        raise AuthRefused(
            f"{type(message).__name__} from role {role!r} on the {plane} plane is not allowed; "
            f"roles there: {', '.join(allowed)}"
        )
