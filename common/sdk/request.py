"""From a caller's arguments to the messages that open a connection and a request.

Owns the checks of a prompt and the Hello. Does not know sockets.
"""

import itertools
import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from common.errors import AuthRefused, BadRequest, DFlashError, VersionMismatch, WireError
from common.sampling import SamplingParams, draw_seed
from common.wire.messages import Hello, Message, Reject, Sampling, Submit, Welcome
from common.wire.tensors import Tensor
from common.wire.version import MAJOR, MINOR, build

HELLO_S: Final = 5.0  # from Hello to Welcome
MAX_PROMPT_BYTES: Final = 32 * 1024 * 1024  # half of what one tensor may hold

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Request:
    """One request, checked."""

    prompt: Tensor
    sampling: SamplingParams
    draft: bool
    timeout_s: float | None

    def submit(self) -> Submit:
        """The message, with an id that is new in this process."""
        return Submit(
            request=f"{os.getpid()}-{next(_numbers)}",
            prompt=self.prompt,
            sampling=Sampling(**self.sampling.as_fields()),
            draft=self.draft,
            deadline_ms=0 if self.timeout_s is None else max(1, round(self.timeout_s * 1000)),
        )


def make_request(
    prompt: str | None,
    prompt_ids: Sequence[int] | None,
    *,
    max_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int | None = None,
    acceptance: str = "exact",
    ignore_eos: bool = False,
    draft: bool = True,
    timeout_s: float | None = None,
) -> Request:
    """Check what a caller asks for.

    Args:
        prompt: text; or None when `prompt_ids` is given.
        prompt_ids: token ids >= 0.
        max_tokens: most tokens to generate.
        temperature: 0 is greedy, the only one honoured here.
        top_p: (0, 1].
        top_k: 0 is off.
        seed: None: one is drawn and reported in the reply.
        acceptance: "exact", the only one honoured here.
        ignore_eos: go on to `max_tokens` past the end-of-text token.
        draft: False: the same stack, nothing drafted.
        timeout_s: deadline of the whole request; None: none.

    Raises:
        BadRequest: a value out of range.
        Unsupported: a known value that is not honoured.
    """
    if timeout_s is not None and not 0 < timeout_s < 1e6:
        raise BadRequest(f"timeout_s: {timeout_s!r}; it must lie in (0, 1000000)")
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=draw_seed() if seed is None else seed,
        acceptance=acceptance,
        ignore_eos=ignore_eos,
    )
    return Request(_prompt_tensor(prompt, prompt_ids), sampling, draft, timeout_s)


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


def _prompt_tensor(prompt: str | None, prompt_ids: Sequence[int] | None) -> Tensor:
    if (prompt is None) == (prompt_ids is None):
        raise BadRequest("prompt: give either a text or prompt_ids")
    if prompt is not None:
        if not isinstance(prompt, str):
            raise BadRequest(f"prompt: {type(prompt).__name__}; it must be str")
        try:
            data = prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadRequest(f"prompt: no valid Unicode at character {error.start}") from error
        if len(data) > MAX_PROMPT_BYTES:
            raise BadRequest(f"prompt: {len(data)} bytes; at most {MAX_PROMPT_BYTES}")
        return Tensor("uint8", (len(data),), data)
    try:
        ids = [operator.index(token) for token in prompt_ids or ()]
    except TypeError as error:
        raise BadRequest(f"prompt_ids: {error}; every id must be a whole number") from error
    if any(not 0 <= token < 2**31 for token in ids):
        raise BadRequest("prompt_ids: every id must lie in 0..2147483647")
    return Tensor("int32", (len(ids),), np.asarray(ids, dtype="<i4").tobytes())
