"""What is counted about rounds and requests, for metrics, `Status` and the log.

Owns the counts. Does not decide anything.
"""

import logging
from collections import Counter

from common.coordinator.events import Request, RoundDone
from common.coordinator.reply import Reply
from common.metrics import Metrics

logger = logging.getLogger(__name__)

WHOLE: tuple[str, ...] = ("stop", "length")  # results of requests that were served


class Tally:
    """Counts into the metrics of the process.

    Attributes:
        ended: requests by how they ended.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.ended: Counter[str] = Counter()
        self._metrics = metrics

    def stale(self) -> None:
        """A message named another round, or a session that is no more."""
        self._metrics.count("dflash_stale")

    def round_done(self, done: RoundDone) -> None:
        """One round."""
        metrics = self._metrics
        metrics.count("dflash_rounds", result="drafted" if done.rows > 1 else "plain")
        metrics.count("dflash_tokens", done.n_tokens)
        metrics.count("dflash_draft_tokens", done.rows - 1)
        metrics.count("dflash_accepted_tokens", done.n_accepted)
        metrics.count("dflash_near_ties", done.near_ties)
        metrics.observe("dflash_round_seconds", done.verify_s, part="verify")
        if done.draft_s > 0:
            metrics.observe("dflash_round_seconds", done.draft_s, part="draft")

    def resumed(self) -> None:
        """A client came back to its request."""
        self._metrics.count("dflash_resumes")

    def refused(self, code: str) -> None:
        """A request that was not let in."""
        self.ended[code] += 1
        self._metrics.count("dflash_requests", result=code)

    def request_ended(self, request: Request, result: str, reply: Reply) -> None:
        """A request that had been let in."""
        self.ended[result] += 1
        self._metrics.count("dflash_requests", result=result)
        if result in WHOLE:
            self._metrics.observe("dflash_ttft_seconds", reply.ttft_s)
        logger.info("%s: %s, %s", request.name, result, reply.line())
