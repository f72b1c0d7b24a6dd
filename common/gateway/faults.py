"""Errors in OpenAI's shape.

Owns which status and type an error of ours becomes, and which parameter it names. Does not know
routes.

Source: OpenAI API reference, "Errors": {"error": {"message", "type", "param", "code"}}.
"""

import math
import re
from dataclasses import dataclass
from typing import Any, Final

from starlette.responses import JSONResponse

from common.errors import (
    BadRequest,
    Busy,
    DeadlineExceeded,
    DFlashError,
    NotReady,
    PeerError,
    TooLong,
    Unsupported,
)

_INVALID: Final = "invalid_request_error"
_SERVER: Final = "server_error"
_STATUS: Final[tuple[tuple[type[DFlashError], int, str, str | None], ...]] = (
    (TooLong, 400, _INVALID, "context_length_exceeded"),
    (Unsupported, 400, _INVALID, "unsupported"),
    (BadRequest, 400, _INVALID, None),
    (Busy, 429, "rate_limit_error", "busy"),
    (DeadlineExceeded, 504, "timeout_error", "deadline_exceeded"),
    (NotReady, 503, _SERVER, "not_ready"),
    (PeerError, 503, _SERVER, "unavailable"),
)
#: Our names of parameters that OpenAI's API spells differently.
_SPELLED: Final = {
    "bias_ids": "logit_bias",
    "bias_values": "logit_bias",
    "prompt_ids": "prompt",
    "template_kwargs": "chat_template_kwargs",
}
_NAMED = re.compile(r"([a-z_]+)(?:[\[.][^:]*)?: ")


@dataclass(frozen=True, slots=True)
class HttpFault(Exception):
    """A refusal of the gateway's own."""

    status: int
    message: str
    kind: str = _INVALID
    param: str | None = None
    code: str | None = None


def fault_of(error: Exception) -> HttpFault:
    """Any error as an HTTP one; what is nobody's fault but ours says nothing of its inside."""
    if isinstance(error, HttpFault):
        return error
    if not isinstance(error, DFlashError):
        return HttpFault(500, "internal error; see the gateway's log", _SERVER, code="internal")
    for kind, status, name, code in _STATUS:
        if isinstance(error, kind):
            param = _param_of(error.message) if status == 400 else None
            return HttpFault(status, error.message, name, param, code)
    return HttpFault(500, error.message, _SERVER, code=error.code)


def body_of(fault: HttpFault) -> dict[str, Any]:
    """The JSON object of an error."""
    return {
        "error": {
            "message": fault.message,
            "type": fault.kind,
            "param": fault.param,
            "code": fault.code,
        }
    }


def response_of(error: Exception) -> JSONResponse:
    """The whole answer."""
    fault, headers = fault_of(error), {}
    if isinstance(error, Busy):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if fault.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(body_of(fault), fault.status, headers)


def _param_of(message: str) -> str | None:
    named = _NAMED.match(message)
    return _SPELLED.get(named[1], named[1]) if named else None
