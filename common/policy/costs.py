"""What all requests on one target know about its milliseconds, and about its drafter's confidence.

Owns the ladder's shape, the plain cost that scales it, the calibration and the shared loss budget.
Does not know requests. Invariant: only plain rounds that ran alone, right after another plain
round, move the plain cost; anything else measures contention or a change of shape.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from common.policy.budget import LossBudget
from common.policy.calibration import Calibration
from common.policy.gate import PlainCost
from common.policy.ladder import PRIOR_PLAIN_MS, CostLadder

N_SEEDS: Final = 3  # the plain cost starts at the median of these many times
AGREEMENT: Final = 0.1  # a sample this near the estimate confirms it
STALE_ROUNDS: Final = 128  # rounds after which the estimate wants to be confirmed
MAX_REFRESH_ROUNDS: Final = 12  # plain rounds spent on one confirmation, at most
DRAFT_WEIGHT: Final = np.float32(0.2)
STALL_LOW: Final = np.float32(0.5)  # of the usual time: a sample counts as at least this share
STALL_HIGH: Final = np.float32(1.25)  # and at most as this one
VERIFY_WEIGHT: Final = np.float32(0.2)
TOO_FAST: Final = np.float32(0.8)  # verifies under this share of their rung belie the estimate
SETTLE_ROUNDS: Final = 32  # rounds between two such findings


class TargetCosts:
    """Costs shared by the requests of one target model and its drafter.

    Args:
        ladder_ms: verify milliseconds for rows 1, 2, .. as the target measured them; empty for
            the published shape.
        calibration: of the drafter's confidences; None: one of its own. Targets of one model and
            one drafter share it.

    Raises:
        ConfigError: a measured time is not finite and positive.

    Attributes:
        calibration: of the drafter's confidences.
        budget: what drafting lost over the last rounds of all requests.
    """

    def __init__(
        self, ladder_ms: Sequence[float] = (), calibration: Calibration | None = None
    ) -> None:
        self._shape = CostLadder.measured(ladder_ms) if ladder_ms else CostLadder.prior()
        self._seeds: list[float] = [self._shape.plain_ms] if ladder_ms else []
        self._plain = PlainCost(self._shape.plain_ms if ladder_ms else PRIOR_PLAIN_MS)
        self._ladder = self._shape.scaled(self._plain.ms)
        self._rounds_unconfirmed = STALE_ROUNDS
        self._draft_ms: np.float32 | None = None
        self._verify_share = np.float32(1)  # of the rung's price, running average
        self._rounds_settled = 0
        self.calibration = calibration or Calibration()
        self.budget = LossBudget()

    @property
    def plain_ms(self) -> float:
        """Estimate for one plain round, in ms."""
        return self._plain.ms

    @property
    def draft_ms(self) -> float:
        """Estimate for one draft, in ms; 0 before the first one."""
        return 0.0 if self._draft_ms is None else float(self._draft_ms)

    @property
    def ladder(self) -> CostLadder:
        """The shape at the present plain cost."""
        if self._ladder.plain_ms != self._plain.ms:
            self._ladder = self._shape.scaled(self._plain.ms)
        return self._ladder

    @property
    def wants_plain(self) -> bool:
        """Whether a plain round is due because the estimate was not confirmed for long.

        Rounds that keep winning would otherwise never show that the machine became faster.
        """
        overdue = self._rounds_unconfirmed - STALE_ROUNDS
        return 0 <= overdue < MAX_REFRESH_ROUNDS

    def count_round(self) -> None:
        """One more round has passed, of any kind, of any request."""
        self._rounds_unconfirmed += 1
        self._rounds_settled += 1
        if self._rounds_unconfirmed >= STALE_ROUNDS + MAX_REFRESH_ROUNDS:
            self._rounds_unconfirmed = 0  # no agreement on a noisy machine: try again later

    def sample_plain(self, ms: float) -> None:
        """Feed one plain round that ran alone after another plain round."""
        if not np.isfinite(ms) or ms <= 0:
            return
        if len(self._seeds) < N_SEEDS:
            self._seeds.append(ms)
            self._plain = PlainCost(float(np.median(np.asarray(self._seeds, np.float32))))
            is_confirmed = len(self._seeds) == N_SEEDS
        else:
            is_confirmed = abs(ms - self._plain.ms) <= AGREEMENT * self._plain.ms
            self._plain.sample(ms)
        if is_confirmed:
            self._rounds_unconfirmed = 0

    def sample_verify(self, rows: int, ms: float) -> None:
        """Feed the verify of a drafted round that ran alone.

        It does not move the plain cost. But verifies far cheaper than their rungs show that the
        plain cost is from slower times, in which every drafted round looks like a gain: it is
        then measured afresh.
        """
        if not np.isfinite(ms) or ms <= 0:
            return
        share = np.float32(ms / self.ladder.ms(rows))
        self._verify_share = np.float32(
            self._verify_share + VERIFY_WEIGHT * (share - self._verify_share)
        )
        if self._verify_share < TOO_FAST and self._rounds_settled >= SETTLE_ROUNDS:
            self._seeds = []
            self._rounds_unconfirmed = STALE_ROUNDS
            self._rounds_settled = 0
            self._verify_share = np.float32(1)

    def sample_draft(self, ms: float) -> None:
        """Feed the time from asking for a draft to having it; one stall moves it little."""
        if not np.isfinite(ms) or ms < 0:
            return
        sample = np.float32(ms)
        if self._draft_ms is None:
            self._draft_ms = sample
            return
        clipped = np.clip(sample, STALL_LOW * self._draft_ms, STALL_HIGH * self._draft_ms)
        self._draft_ms = np.float32(self._draft_ms + DRAFT_WEIGHT * (clipped - self._draft_ms))

    def without_stall(self, rows: int, wall_ms: float) -> float:
        """What a drafted round of `rows` rows is to be judged by: its time, less any stall.

        A machine that is busy for a moment stalls plain rounds as well. Judged by raw times, one
        stall would use up the loss budget and keep drafts out for 64 rounds.
        """
        usual_ms = np.float32(self.draft_ms) + np.float32(self.ladder.ms(rows))
        return float(min(np.float32(wall_ms), STALL_HIGH * usual_ms))
