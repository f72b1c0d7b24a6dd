"""What a request has produced so far: committed ids, times and statistics.

Owns the committed ids of one request and the numbers of its `stats`. Does not know rounds to come.
Invariant: ids are only ever appended, and `first_at`, `last_at` are those of real tokens.
"""

import json
from collections import Counter
from collections.abc import Sequence

from common.policy.stats import PositionStats
from common.sampling import is_lossy
from common.wire.messages import Prefilled, Sampling, Verified


class Reply:
    """Grows with every commit.

    Args:
        submitted_at: monotonic seconds.
        sampling: of the request; a lossy acceptance is labelled so.

    Attributes:
        ids: committed token ids, without the prompt.
    """

    def __init__(self, submitted_at: float, sampling: Sampling) -> None:
        self.ids: list[int] = []
        self._submitted_at = submitted_at
        self._sampling = sampling
        self._first_at = self._last_at = submitted_at
        self._near_ties = 0
        self._positions = PositionStats()
        self._rounds = self._drafted_rounds = 0
        self._tokens_of_drafted_rounds = 0
        self._drafts_sent = self._drafts_accepted = 0
        self._accepted_at: list[int] = []
        self._plain_reasons: Counter[str] = Counter()
        self._builds: Counter[str] = Counter()
        self._first_ms = 0.0
        self._ngram_hits = self._ngram_misses = 0
        self._cached_tokens = 0

    def commit(self, ids: Sequence[int], now: float, answer: Prefilled | Verified) -> None:
        """Append tokens that reach the client now, of an answer of the target."""
        self._near_ties += answer.near_ties
        self._ngram_hits += answer.ngram_hits
        self._ngram_misses += answer.ngram_misses
        if isinstance(answer, Prefilled) and not self.ids:  # a replay's is no part of the prompt
            self._cached_tokens = answer.cached_tokens
        if not ids:
            return
        if not self.ids:
            self._first_at = now
        self._last_at = now
        self.ids.extend(ids)

    def count_round(self, verdict: Verified, plain_reason: str) -> None:
        """Count a round; more than one row makes it a drafted round."""
        rows, n_accepted = verdict.rows_run, verdict.n_accepted
        self._rounds += 1
        self._builds[verdict.build] += 1
        self._first_ms += verdict.first_ms
        self._positions.record(rows - 1, n_accepted)
        if rows == 1:
            self._plain_reasons[plain_reason] += 1
            return
        self._drafted_rounds += 1
        self._tokens_of_drafted_rounds += len(verdict.ids)
        self._drafts_sent += rows - 1
        self._drafts_accepted += n_accepted
        reached = min(n_accepted + 1, rows - 1)
        self._accepted_at.extend([0] * (reached - len(self._accepted_at)))
        for position in range(n_accepted):
            self._accepted_at[position] += 1

    @property
    def ttft_s(self) -> float:
        """From submit to the first token; 0 before it."""
        return self._first_at - self._submitted_at

    def line(self) -> str:
        """One line for the log: acceptance by position and rows."""
        return (
            f"tokens={len(self.ids)} rounds={self._rounds} drafted={self._drafted_rounds} "
            f"accepted={self._drafts_accepted}/{self._drafts_sent} "
            f"acc={self._positions.format_acceptance() or '-'} "
            f"rows={self._positions.format_rows() or '-'}"
        )

    def stats(self) -> str:
        """The JSON object of a finished reply; its keys are stable."""
        took_s = self._last_at - self._first_at
        drafted = self._drafted_rounds
        body = {
            "rounds": self._rounds,
            "drafted_rounds": drafted,
            "plain_rounds": self._rounds - drafted,
            "plain_reasons": dict(self._plain_reasons),
            "drafts_sent": self._drafts_sent,
            "drafts_accepted": self._drafts_accepted,
            "acceptance_length": self._tokens_of_drafted_rounds / drafted if drafted else 0.0,
            "accepted_by_position": self._accepted_at,
            "rows_histogram": {str(r): n for r, n in self._positions.rows_histogram().items()},
            "tokens_per_s": (len(self.ids) - 1) / took_s if took_s > 0 else 0.0,
            "ttft_s": self.ttft_s,
            "near_ties": self._near_ties,
            "acceptance": self._sampling.acceptance,
            "lossy": is_lossy(self._sampling),
            "builds": dict(self._builds),
            "ngram_hits": self._ngram_hits,
            "ngram_misses": self._ngram_misses,
            "cached_tokens": self._cached_tokens,
            "first_ms": self._first_ms / self._rounds if self._rounds else 0.0,
        }
        return json.dumps(body)
