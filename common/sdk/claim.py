"""What lets a stream be taken up again on another connection, and how far its reader is.

Owns the Submit of a request, first and again, how long to go on trying, and when to say Read. Pure:
times are passed in (monotonic seconds). Does not know sockets.
Invariant: every Submit of one request carries the same claim, so it never runs twice.
"""

import secrets
from dataclasses import replace
from typing import Final

from common.wire.messages import Read, Submit

WINDOW: Final = 512  # tokens; half the link's mark even if every token is a message of its own
TELL_AFTER: Final = WINDOW // 4  # tokens taken until the coordinator is told
CLAIM_BYTES: Final = 16  # of a claim: not to be guessed
PAUSE_S: Final = 0.05  # before the second try; doubles up to MAX_PAUSE_S
MAX_PAUSE_S: Final = 1.0
MAX_CONNECT_S: Final = 2.0  # of one try


class Claim:
    """The hold on one request.

    Args:
        submit: as for a connection that never breaks.
        resume_s: how long to try to come back after a loss; 0: not at all, and no claim is shown.
        timeout_s: the request's deadline from now; None: none.
        now: at the first Submit.

    Attributes:
        n_resumed: how often the stream was taken up again.
    """

    def __init__(
        self, submit: Submit, resume_s: float, timeout_s: float | None, now: float
    ) -> None:
        claim = secrets.token_hex(CLAIM_BYTES) if resume_s > 0 else ""
        self.submit = replace(submit, claim=claim, window=WINDOW)
        self.n_resumed = 0
        self._resume_s = resume_s
        self._ends_at = None if timeout_s is None else now + timeout_s
        self._broke_at: float | None = None
        self._n_tries = 0
        self._n_told = 0

    def heard(self) -> None:
        """A message about the request came: the connection works."""
        self._broke_at = None
        self._n_tries = 0

    def left_s(self, now: float) -> float:
        """How long to go on trying after a loss; 0: no more. The first call begins the time."""
        if self._broke_at is None:
            self._broke_at = now
        until = self._broke_at + self._resume_s
        if self._ends_at is not None:
            until = min(until, self._ends_at)
        return max(0.0, until - now)

    def pause_s(self, now: float) -> float:
        """How long to wait before the next try."""
        self._n_tries += 1
        if self._n_tries == 1:
            return 0.0
        pause_s: float = min(MAX_PAUSE_S, PAUSE_S * 2.0 ** (self._n_tries - 2))
        return min(pause_s, self.left_s(now))

    def again(self, n_tokens: int, now: float) -> Submit:
        """The Submit for another connection, which goes on at token `n_tokens`."""
        self.n_resumed += 1
        self._n_told = n_tokens
        deadline_ms = 0
        if self._ends_at is not None:
            deadline_ms = max(1, round((self._ends_at - now) * 1000))
        return replace(self.submit, from_index=n_tokens, deadline_ms=deadline_ms)

    def read(self, n_taken: int) -> Read | None:
        """What to tell the coordinator when its reader has taken `n_taken` tokens."""
        if n_taken - self._n_told < TELL_AFTER:
            return None
        self._n_told = n_taken
        return Read(self.submit.request, n_taken)
