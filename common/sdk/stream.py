"""What a client knows about one request: pure state, fed with messages and times.

Owns the order of tokens, the text, how a request ends, and when silence becomes an error. Does not
know sockets or threads: `client` and `aio` are two thin shells around it.
Invariant: `token_ids` grows without gap or repetition; it never shrinks.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from common.errors import DeadlineExceeded, PeerLost, PeerSilent, WireError, from_wire
from common.wire.messages import (
    Accepted,
    Done,
    Failed,
    Message,
    PrefillProgress,
    Reject,
    Status,
    Tokens,
)

ASK_AFTER_S: Final = 10.0  # silence after which the client asks whether the coordinator lives
LOST_AFTER_S: Final = 20.0  # silence after which it counts as gone, the question included
DEADLINE_GRACE_S: Final = 2.0  # the coordinator answers first; this is for when it cannot


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """Something happened before the first token."""

    phase: Literal["queued", "accepted", "prefill"]
    done: int  # prefill: prompt tokens forwarded; else 0
    total: int  # prefill: prompt tokens; queued: requests ahead; else 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities under the model's own scores, before any sampling."""

    chosen: float
    top: tuple[tuple[int, float], ...]  # the most likely ids and theirs, best first


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Newly committed tokens, in order, each index exactly once."""

    index: int  # index of ids[0] among the generated tokens
    ids: tuple[int, ...]
    pieces: tuple[str, ...]  # one text piece per id
    n_accepted: int  # the first n_accepted ids were drafts, the rest is the target's own
    text: str  # the pieces joined
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per id, where asked for


@dataclass(frozen=True, slots=True)
class EndEvent:
    """The last event of a request that was completed."""

    text: str  # what the detokenizer still held back; mostly ""
    finish_reason: str  # "stop" | "length"
    stats: Mapping[str, Any]  # as in `Completion`


Event = ProgressEvent | TokenEvent | EndEvent


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole reply.

    `stats` holds `rounds`, `drafted_rounds`, `plain_rounds`, `drafts_sent`, `drafts_accepted`,
    `acceptance_length`, `accepted_by_position`, `rows_histogram`, `tokens_per_s`, `ttft_s`,
    `near_ties`, `plain_reasons`, `builds` (rounds by how the target built them), `first_ms`,
    `ngram_hits` and `ngram_misses` (rows of the target's n-gram table, by its row cache),
    `cached_tokens` (of the prompt, that an earlier request of the same key left at the target).
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str  # "stop" | "length"
    seed: int  # the one in force
    stats: Mapping[str, Any] = field(default_factory=dict)
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per id, where asked for

    @property
    def n_tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.token_ids)

    def as_json(self) -> dict[str, Any]:
        """The object that `dflash-up generate --json` prints."""
        body: dict[str, Any] = {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "stats": dict(self.stats),
        }
        if self.logprobs:
            body["logprobs"] = [
                {"logprob": one.chosen, "top": [list(pair) for pair in one.top]}
                for one in self.logprobs
            ]
        return body


class StreamState:
    """Follows one request from submit to its end."""

    def __init__(self, request: str, now: float, timeout_s: float | None) -> None:
        """Start to follow `request`.

        Args:
            request: the client's id of the request.
            now: monotonic seconds at submit.
            timeout_s: the request's deadline from now; None: none.
        """
        self.request = request
        self.seed = 0
        self.token_ids: list[int] = []
        self.completion: Completion | None = None
        self.is_over = False  # Done or Failed came: there is nothing left to cancel
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._submitted_s = self._heard_s = now
        self._first_s = self._last_s = 0.0  # arrival of the first and of the last token
        self._has_asked = self._is_accepted = False
        self._timeout_s = timeout_s

    def resumed(self, now: float) -> None:
        """The request goes on on another connection, which has said nothing yet."""
        self._heard_s = now
        self._has_asked = False

    def next_deadline(self) -> float:
        """Monotonic seconds at which `on_time` wants to be called if nothing arrives."""
        silence = LOST_AFTER_S if self._has_asked else ASK_AFTER_S
        due = self._heard_s + silence
        if self._timeout_s is not None:
            due = min(due, self._submitted_s + self._timeout_s + DEADLINE_GRACE_S)
        return due

    def on_time(self, now: float) -> bool:
        """Judge the silence; True: send a StatusRequest, whose answer shows that someone lives.

        Raises:
            DeadlineExceeded: the request's own deadline passed without an answer.
            PeerSilent: the coordinator answered nothing at all.
        """
        if self._timeout_s is not None and (
            now >= self._submitted_s + self._timeout_s + DEADLINE_GRACE_S
        ):
            raise DeadlineExceeded(f"request {self.request}: not done after {self._timeout_s:g} s")
        if now >= self._heard_s + LOST_AFTER_S:
            raise PeerSilent(
                f"coordinator: silent for {now - self._heard_s:.0f} s; is the system still running?"
            )
        if now >= self._heard_s + ASK_AFTER_S and not self._has_asked:
            self._has_asked = True
            return True
        return False

    def on_message(self, message: Message, now: float) -> Event | None:
        """Take one message from the coordinator.

        Raises:
            DFlashError: the request failed (the type is the failure's), was cancelled, or the
                coordinator sent what it must not send (WireError).
        """
        self._heard_s = now
        self._has_asked = False
        match message:
            case Status():
                return None
            case Accepted(request=self.request):
                if self._is_accepted:
                    return None  # a resume is no news to the reader
                self.seed, self._is_accepted = message.seed, True
                phase: Literal["queued", "accepted"] = (
                    "queued" if message.queued_behind else "accepted"
                )
                return ProgressEvent(phase, 0, message.queued_behind)
            case PrefillProgress(name=self.request):
                return ProgressEvent("prefill", message.done, message.total)
            case Tokens(request=self.request):
                return self._on_tokens(message, now)
            case Done(request=self.request):
                return self._on_done(message)
            case Failed(name=self.request):
                self.is_over = True
                raise from_wire(message.code, message.message, retry_after_s=message.retry_after_s)
            case Reject():
                # Heard, but not known: nothing more comes on this connection, and it is not reused.
                raise PeerLost(
                    f"coordinator: it no longer knows this connection ({message.message}); "
                    "send the request again"
                )
            case _:
                return None

    def _on_tokens(self, message: Tokens, now: float) -> TokenEvent | None:
        have = len(self.token_ids)
        if not message.ids or message.index + len(message.ids) <= have:
            return None  # a repetition: each index reaches the caller once
        if message.index != have or len(message.pieces) != len(message.ids):
            raise WireError(
                f"Tokens.index: expected {have} and one piece per id, got {message.index}, "
                f"{len(message.ids)} ids, {len(message.pieces)} pieces"
            )
        if not have:
            self._first_s = now
        self._last_s = now
        self.token_ids.extend(message.ids)
        self._pieces.extend(message.pieces)
        logprobs = _logprobs_of(message)
        self._logprobs.extend(logprobs)
        text = "".join(message.pieces)
        return TokenEvent(have, message.ids, message.pieces, message.n_accepted, text, logprobs)

    def _on_done(self, message: Done) -> EndEvent:
        if message.n_tokens != len(self.token_ids):
            raise WireError(
                f"Done.n_tokens: expected {len(self.token_ids)}, the tokens that came, "
                f"got {message.n_tokens}"
            )
        self.is_over = True
        self.completion = Completion(
            text="".join(self._pieces) + message.tail,
            token_ids=tuple(self.token_ids),
            finish_reason=message.finish_reason,
            seed=self.seed,
            stats=self._stats(message.stats),
            logprobs=tuple(self._logprobs),
        )
        return EndEvent(message.tail, message.finish_reason, self.completion.stats)

    def _stats(self, body: str) -> dict[str, Any]:
        """The coordinator's statistics; the times it left out are taken from arrivals here."""
        try:
            stats = json.loads(body) if body else {}
        except ValueError as error:
            raise WireError(f"Done.stats: expected a JSON object, got {body!r:.40}") from error
        if not isinstance(stats, dict):
            raise WireError(f"Done.stats: expected a JSON object, got {body!r:.40}")
        took_s = self._last_s - self._first_s
        rate = (len(self.token_ids) - 1) / took_s if took_s > 0 else 0.0
        stats.setdefault("tokens_per_s", rate)
        stats.setdefault("ttft_s", max(0.0, self._first_s - self._submitted_s))
        return stats


def _logprobs_of(message: Tokens) -> tuple[TokenLogprobs, ...]:
    """One entry per id; the message holds them flat, as many top ids for each."""
    chosen, n_top = message.logprobs, len(message.top_ids)
    if not chosen:
        return ()
    if len(chosen) != len(message.ids) or n_top % len(chosen) or n_top != len(message.top_logprobs):
        raise WireError(
            f"Tokens.logprobs: expected one per id and as many top ids for each, got {len(chosen)} "
            f"for {len(message.ids)} ids, {n_top} top ids, {len(message.top_logprobs)} of theirs"
        )
    each = n_top // len(chosen)
    pairs = list(zip(message.top_ids, message.top_logprobs, strict=True))
    return tuple(
        TokenLogprobs(value, tuple(pairs[index * each : (index + 1) * each]))
        for index, value in enumerate(chosen)
    )


def parse_status(message: Status) -> dict[str, Any]:
    """The JSON object of a Status."""
    try:
        body = json.loads(message.body)
    except ValueError as error:
        raise WireError(f"Status.body: expected a JSON object, got {message.body!r:.40}") from error
    if not isinstance(body, dict):
        raise WireError(f"Status.body: expected a JSON object, got {message.body!r:.40}")
    return body
