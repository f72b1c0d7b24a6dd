"""What the request machine is told (past facts) and what it orders (commands); all frozen.

Owns the names. Wire messages that already are facts (Opened, Prefilled, Drafted, ..) are passed on
as they are; here stand those that come from inside the coordinator. Does not decide anything.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from common.policy.copies import CopyFinder
from common.policy.policy import RoundPolicy
from common.wire.messages import (
    Done,
    Drafted,
    DraftFailed,
    Failed,
    Message,
    Opened,
    Prefilled,
    PrefillProgress,
    Sampling,
    Tokens,
    Verified,
)
from common.wire.tensors import Tensor

Post = Callable[[str, Message], None]  # takes a message for a peer
ToReader = PrefillProgress | Tokens | Done | Failed  # what a client sees of a request


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked for; times in monotonic seconds."""

    number: int  # the coordinator's own count; names sessions
    client: str  # peer
    name: str  # the client's id
    prompt: Tensor  # uint8 text or int32 ids
    sampling: Sampling
    draft: bool
    submitted_at: float
    expires_at: float | None
    is_chat: bool = False  # the text is a JSON object of messages
    allow_special: bool = False  # special tokens written out in the text become those tokens
    owner: str = ""  # whose key and scope sent it; "" where there are none


@dataclass(frozen=True, slots=True)
class Scene:
    """What a round must know of the world around its request."""

    is_solo: bool = True  # no other session is at work on the target
    can_draft: bool = True  # the drafter is not in quarantine
    draft_deadline_s: float = 0.05  # how long to wait for a draft
    is_reader_behind: bool = False  # its client has as many unread tokens as it wants


class Phase(Enum):
    """Where a request stands."""

    WAITING = auto()
    PREFILLING = auto()
    DRAFTING = auto()
    VERIFYING = auto()
    PAUSED = auto()
    ENDED = auto()


# --------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Placed:
    """A target has a place for the request."""

    policy: RoundPolicy
    has_taps: bool  # features are to be computed, something may be drafted
    own_block: int = 0  # B where the target drafts for itself: no drafter is asked for, then
    memory: CopyFinder | None = None  # empty; where copies are to be looked for


@dataclass(frozen=True, slots=True)
class DrafterAssigned:
    """A drafter has a place for the session; how it reaches the target's data socket."""

    endpoint: str
    server_key: str
    block_size: int


@dataclass(frozen=True, slots=True)
class DrafterLost:
    """The drafter, its session or its link is gone; `retry_s`: how long not to ask for another."""

    reason: str
    retry_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TargetLost:
    """The target or its session is gone."""

    reason: str
    can_replay: bool  # another target could take the request


@dataclass(frozen=True, slots=True)
class Stopped:
    """Nobody wants the answer any more, or nobody can give it: code and sentence for the client."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class ReaderReady:
    """The client has read on, or is gone: a pause is over."""


@dataclass(frozen=True, slots=True)
class DeadlineReached:
    """The time in `RequestMachine.due` has come."""


Event = (
    Placed
    | DrafterAssigned
    | DrafterLost
    | TargetLost
    | Stopped
    | ReaderReady
    | DeadlineReached
    | Opened
    | PrefillProgress
    | Prefilled
    | Drafted
    | DraftFailed
    | Verified
    | Failed
)


# --------------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class ToTarget:
    """Send to the session's target."""

    message: Message


@dataclass(frozen=True, slots=True)
class ToDrafter:
    """Send to the session's drafter."""

    message: Message


@dataclass(frozen=True, slots=True)
class ToClient:
    """Send to the client."""

    message: ToReader


@dataclass(frozen=True, slots=True)
class LeaveDrafter:
    """The session's place at its drafter is free again."""


@dataclass(frozen=True, slots=True)
class LeaveTarget:
    """The session's place at its target is free again."""


@dataclass(frozen=True, slots=True)
class DraftTook:
    """A draft came in time, so many milliseconds after it was asked for."""

    ms: float


@dataclass(frozen=True, slots=True)
class StrikeDrafter:
    """The drafter was late or sent what it must not send."""

    reason: str


@dataclass(frozen=True, slots=True)
class TargetStuck:
    """The target is over its time budget: nothing more may be given to it."""

    reason: str


@dataclass(frozen=True, slots=True)
class WantTarget:
    """The request waits for a place, before those that have not begun."""


@dataclass(frozen=True, slots=True)
class RoundDone:
    """For metrics: one round, its rows, accepted drafts and near-ties."""

    rows: int
    n_accepted: int
    n_tokens: int
    near_ties: int
    draft_s: float
    verify_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    """The request is over: "stop", "length", or the code of its failure."""

    result: str


Command = (
    ToTarget
    | ToDrafter
    | ToClient
    | LeaveDrafter
    | LeaveTarget
    | DraftTook
    | StrikeDrafter
    | TargetStuck
    | WantTarget
    | RoundDone
    | Ended
)
