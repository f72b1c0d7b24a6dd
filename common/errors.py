"""The error tree, shared by every process, the SDK and the command line.

Owns the classes, their wire codes and their exit codes. Does not know who raises them.

    DFlashError                   code, retryable, message for a human
    ├── ConfigError               unknown key, bad value, bad path                      exit 2
    ├── NotReady                  a process was not ready in time                       exit 3
    ├── AddressInUse              another run holds the name, socket or port            exit 4
    ├── ModelMismatch             target, drafter or tokenizer do not fit               exit 5
    ├── KeyFault                  CURVE keys missing, malformed, or without a role      exit 6
    ├── WireError                 bad bytes; names path, expected, got
    │   ├── TooLarge
    │   ├── BadTensor
    │   └── VersionMismatch       names both sides                                      exit 5
    ├── PeerError
    │   ├── PeerLost
    │   ├── PeerSilent
    │   └── AuthRefused                                                                 exit 6
    ├── RequestError
    │   ├── BadRequest                                                                  exit 2
    │   ├── Unsupported                                                                 exit 2
    │   ├── TooLong                                                                     exit 2
    │   ├── Busy                  carries retry_after_s
    │   ├── Cancelled
    │   ├── UnknownClaim      nothing to resume
    │   ├── SlowReader        the client did not read on
    │   └── DeadlineExceeded
    └── EngineError
        ├── StaleBlock
        ├── RollBackRefused
        └── NotFinite

Every message has three parts: what, the value, what would be right.
"""

from typing import ClassVar


class DFlashError(Exception):
    """Root of the tree.

    Attributes:
        code: stable snake_case name, sent on the wire.
        retryable: whether the same call may succeed later without a change.
        exit_code: what `dflash-up` exits with when this ends a command.
    """

    code: ClassVar[str] = "failed"
    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1

    @property
    def message(self) -> str:
        """The sentence for a human."""
        return str(self)


class ConfigError(DFlashError):
    """A configuration value, flag or path is wrong."""

    code = "config"
    exit_code = 2


class NotReady(DFlashError):
    """A process was not ready within its time limit."""

    code = "not_ready"
    retryable = True
    exit_code = 3


class AddressInUse(DFlashError):
    """Another run holds this name, socket or port."""

    code = "address_in_use"
    exit_code = 4


class ModelMismatch(DFlashError):
    """A checkpoint is incomplete, or target, drafter and tokenizer do not fit each other."""

    code = "model_mismatch"
    exit_code = 5


class KeyFault(DFlashError):
    """A CURVE key is missing, malformed, revoked, or has no role."""

    code = "keys"
    exit_code = 6


class WireError(DFlashError):
    """Bytes from a peer do not make a message; names path, expected and got."""

    code = "bad_message"


class TooLarge(WireError):
    """A header, frame or count is over its cap."""

    code = "too_large"


class BadTensor(WireError):
    """A tensor's dtype, shape or byte count does not fit."""

    code = "bad_tensor"


class VersionMismatch(WireError):
    """The two sides speak different major versions of the protocol."""

    code = "version_mismatch"
    exit_code = 5


class PeerError(DFlashError):
    """Something is wrong with the other side of a link."""

    code = "peer"
    retryable = True


class PeerLost(PeerError):
    """The peer's process or connection is gone."""

    code = "peer_lost"


class PeerSilent(PeerError):
    """The peer did not answer within its deadline."""

    code = "peer_silent"


class AuthRefused(PeerError):
    """The peer's key is not allowed to do this."""

    code = "auth_refused"
    retryable = False
    exit_code = 6


class RequestError(DFlashError):
    """One request failed; others are unaffected."""

    code = "request"


class BadRequest(RequestError):
    """The request itself is malformed."""

    code = "bad_request"
    exit_code = 2


class Unsupported(RequestError):
    """A parameter is known but not honoured here; named rather than ignored."""

    code = "unsupported"
    exit_code = 2


class TooLong(RequestError):
    """Prompt plus max_tokens does not fit the context."""

    code = "too_long"
    exit_code = 2


class Busy(RequestError):
    """The queue is full; try again after `retry_after_s` seconds."""

    code = "busy"
    retryable = True

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Cancelled(RequestError):
    """The client cancelled the request."""

    code = "cancelled"


class UnknownClaim(RequestError):
    """No request of this client goes by this claim, or its reply is no longer kept."""

    code = "unknown_claim"


class SlowReader(RequestError):
    """The client did not take its tokens for so long that the request was given up."""

    code = "slow_reader"


class DeadlineExceeded(RequestError):
    """The request's deadline passed."""

    code = "deadline_exceeded"
    retryable = True


class EngineError(DFlashError):
    """The target's or drafter's engine refused an operation; nothing changed."""

    code = "engine"


class StaleBlock(EngineError):
    """A draft block does not belong to the session's present anchor."""

    code = "stale_block"


class RollBackRefused(EngineError):
    """A roll back cannot be served; raised before any state changed."""

    code = "roll_back_refused"


class NotFinite(EngineError):
    """Logits hold no finite value in a row that decides."""

    code = "not_finite"


def _subclasses(root: type[DFlashError]) -> list[type[DFlashError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _subclasses(child))]


BY_CODE: dict[str, type[DFlashError]] = {kind.code: kind for kind in _subclasses(DFlashError)}


def from_wire(code: str, message: str, *, retry_after_s: float = 1.0) -> DFlashError:
    """Rebuild an error from its wire form; an unknown code becomes a plain DFlashError."""
    kind = BY_CODE.get(code, DFlashError)
    if kind is Busy:
        return Busy(message, retry_after_s)
    return kind(message)
