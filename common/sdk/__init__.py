"""The client SDK: `Client` and `AsyncClient`, what they return and what they raise.

Owns how a program talks to a running system. Does not know workers, rounds or the policy.
May import: `common.net`, `common.wire` and all to their left.
"""

from common.errors import (
    BadRequest,
    Busy,
    Cancelled,
    DeadlineExceeded,
    DFlashError,
    PeerLost,
    PeerSilent,
    TooLong,
    Unsupported,
)
from common.sdk.aio import AsyncClient, AsyncStream
from common.sdk.client import Client, Stream
from common.sdk.stream import Completion, EndEvent, ProgressEvent, TokenEvent

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "BadRequest",
    "Busy",
    "Cancelled",
    "Client",
    "Completion",
    "DFlashError",
    "DeadlineExceeded",
    "EndEvent",
    "PeerLost",
    "PeerSilent",
    "ProgressEvent",
    "Stream",
    "TokenEvent",
    "TooLong",
    "Unsupported",
]
