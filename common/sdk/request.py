"""From a caller's arguments to the messages that open a connection and a request.

Owns the checks of a prompt and the Hello. Does not know sockets.
"""

import itertools
import json
import numbers
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Unpack

import numpy as np

from common.errors import AuthRefused, BadRequest, DFlashError, VersionMismatch, WireError
from common.sampling import SamplingParams
from common.sdk.options import Options, sampling_of
from common.wire.messages import (
    MAX_SESSION_CHARS,
    Hello,
    Message,
    Reject,
    Sampling,
    Submit,
    Welcome,
)
from common.wire.tensors import Tensor
from common.wire.version import MAJOR, MINOR, build

HELLO_S: Final = 5.0  # from Hello to Welcome
RESUME_S: Final = 10.0  # from the loss of a connection to giving the request up
MAX_PROMPT_BYTES: Final = 32 * 1024 * 1024  # half of what one tensor may hold

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Request:
    """One request, checked."""

    prompt: Tensor
    sampling: SamplingParams
    draft: bool
    timeout_s: float | None
    is_chat: bool = False
    allow_special: bool = False
    share_scope: str = ""
    resume_s: float = RESUME_S

    def submit(self) -> Submit:
        """The message, with an id that is new in this process."""
        return Submit(
            request=f"{os.getpid()}-{next(_numbers)}",
            prompt=self.prompt,
            sampling=Sampling(**self.sampling.as_fields()),
            draft=self.draft,
            deadline_ms=0 if self.timeout_s is None else max(1, round(self.timeout_s * 1000)),
            is_chat=self.is_chat,
            allow_special=self.allow_special,
            share_scope=self.share_scope,
        )


def make_request(
    prompt: str | None, prompt_ids: Sequence[int] | None, **options: Unpack[Options]
) -> Request:
    """Check what a caller asks for.

    Args:
        prompt: text; or None when `prompt_ids` or `messages` are given.
        prompt_ids: token ids >= 0.
        **options: see `Options`.

    Raises:
        BadRequest: an unknown option, a value out of range, or not exactly one kind of prompt.
    """
    timeout_s, resume_s = options.get("timeout_s"), options.get("resume_s", RESUME_S)
    if timeout_s is not None and not (_is_number(timeout_s) and 0 < timeout_s < 1e6):
        raise BadRequest(f"timeout_s: {timeout_s!r:.40}; it must be a number in (0, 1000000)")
    if not (_is_number(resume_s) and 0 <= resume_s < 3600):
        raise BadRequest(f"resume_s: {resume_s!r:.40}; it must be a number in [0, 3600)")
    if type(options.get("allow_special", False)) is not bool:
        raise BadRequest(
            f"allow_special: {options['allow_special']!r:.40}; it must be true or false"
        )
    sampling, messages = sampling_of(options), options.get("messages")
    if sum(given is not None for given in (prompt, prompt_ids, messages)) != 1:
        raise BadRequest("prompt: give one of a text, prompt_ids and messages")
    for name in ("tools", "template_kwargs"):
        if messages is None and options.get(name) is not None:
            raise BadRequest(f"{name}: only a chat has them; give messages")
    if messages is None:
        tensor = _text_tensor("prompt", prompt) if prompt is not None else _ids_tensor(prompt_ids)
    else:
        tensor = _text_tensor("messages", _chat_body(messages, options))
    return Request(
        tensor,
        sampling,
        draft=options.get("draft", True),
        timeout_s=timeout_s,
        is_chat=messages is not None,
        allow_special=options.get("allow_special", False),
        share_scope=_scope(options.get("share_scope", "")),
        resume_s=resume_s,
    )


def client_hello(role: str = "client", name: str = "") -> Hello:
    """The first message of a client or administrator."""
    pid = os.getpid()
    return Hello(
        role=role, name=name or f"{role}.{pid}", major=MAJOR, minor=MINOR, build=build(), pid=pid
    )


def check_welcome(message: Message) -> Welcome:
    """Take the answer to a Hello.

    Raises:
        VersionMismatch, AuthRefused, DFlashError: the coordinator's reason to refuse.
        WireError: neither Welcome nor Reject.
    """
    if isinstance(message, Reject):
        kinds: dict[str, type[DFlashError]] = {
            VersionMismatch.code: VersionMismatch,
            AuthRefused.code: AuthRefused,
        }
        raise kinds.get(message.code, DFlashError)(message.message)
    if not isinstance(message, Welcome):
        raise WireError(f"answer to Hello: expected Welcome, got {type(message).__name__}")
    return message


def _chat_body(messages: Sequence[Mapping[str, Any]], options: Options) -> str:
    given = {"messages": messages, "tools": options.get("tools")}
    chat: dict[str, Any] = {
        name: _list_of(name, value) for name, value in given.items() if value is not None
    }
    arguments = options.get("template_kwargs")
    if arguments is not None:
        if not isinstance(arguments, Mapping):
            raise BadRequest(f"template_kwargs: {arguments!r:.40}; a mapping is needed")
        chat["template_kwargs"] = dict(arguments)
    try:
        return json.dumps(chat, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"messages: {error}; they must be what JSON can hold") from error


def _list_of(name: str, value: Any) -> list[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise BadRequest(f"{name}: {value!r:.40}; a list is needed")
    return list(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _text_tensor(what: str, text: str) -> Tensor:
    if not isinstance(text, str):
        raise BadRequest(f"{what}: {type(text).__name__}; it must be str")
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRequest(f"{what}: no valid Unicode at character {error.start}") from error
    if len(data) > MAX_PROMPT_BYTES:
        raise BadRequest(f"{what}: {len(data)} bytes; at most {MAX_PROMPT_BYTES}")
    return Tensor("uint8", (len(data),), data)


def _ids_tensor(prompt_ids: Sequence[int] | None) -> Tensor:
    try:
        ids = [operator.index(token) for token in prompt_ids or ()]
    except TypeError as error:
        raise BadRequest(f"prompt_ids: {error}; every id must be a whole number") from error
    if any(not 0 <= token < 2**31 for token in ids):
        raise BadRequest("prompt_ids: every id must lie in 0..2147483647")
    return Tensor("int32", (len(ids),), np.asarray(ids, dtype="<i4").tobytes())


def _scope(name: object) -> str:
    if not isinstance(name, str) or len(name) > MAX_SESSION_CHARS:
        raise BadRequest(
            f"share_scope: {name!r:.40}; a text of at most {MAX_SESSION_CHARS} characters"
        )
    return name
