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
    SlowReader,
    TooLong,
    UnknownClaim,
    Unsupported,
)
from common.sdk.aio import AsyncClient
from common.sdk.aio_inflight import AsyncStream
from common.sdk.client import Client
from common.sdk.inflight import Stream
from common.sdk.looks import Health, ModelInfo
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
    "Health",
    "ModelInfo",
    "PeerLost",
    "PeerSilent",
    "ProgressEvent",
    "SlowReader",
    "Stream",
    "TokenEvent",
    "TooLong",
    "UnknownClaim",
    "Unsupported",
]
