"""Plan each round: draft at all, and how many rows to verify.

Owns the order in which gate, budget, calibration and ladder are asked. Does not know time, peers
or messages; the coordinator measures and tells. Invariant: whatever is planned, only time changes,
never output.

A round goes `plan` -> (a draft arrives: `choose`) -> `observe`, also when the draft failed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.policy.budget import LossBudget
from common.policy.caution import Caution
from common.policy.copies import LONG_SUFFIX, Copy, CopyStats
from common.policy.costs import STALL_HIGH, TargetCosts
from common.policy.gate import DraftGate
from common.policy.ladder import MAX_ROWS, choose_rows


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """How a round begins.

    Attributes:
        n_drafts: drafts to ask for, 0..15; 0 is a plain round.
        reason: why the round is plain, for metrics; empty when it drafts.
    """

    n_drafts: int
    reason: str = ""

    @property
    def draft(self) -> bool:
        """Whether a drafter is asked."""
        return self.n_drafts > 0


@dataclass(frozen=True, slots=True)
class RoundResult:
    """How a round went.

    Attributes:
        is_drafted: a drafter was asked, whether or not a block came.
        rows: rows the target ran, 1..16.
        n_accepted: 0..rows-1.
        wall_ms: from the round's first message to its verdict.
        draft_ms: of it, until the draft came or was given up; 0 without a draft.
        confidences: of the block's drafts; empty when none came.
        is_solo: no other session was at work on the target meanwhile.
        is_final: the request ended here, so the accepted prefix may have been cut short.
        copy_suffix_len: tokens of agreement before a copy; 0 when the drafts were no copy.
        certainty: share of the target's best token where it chose the next anchor, 0..1.
    """

    is_drafted: bool
    rows: int
    n_accepted: int
    wall_ms: float
    draft_ms: float = 0.0
    confidences: tuple[float, ...] = ()
    is_solo: bool = True
    is_final: bool = False
    copy_suffix_len: int = 0
    certainty: float = 1.0


class RoundPolicy(Protocol):
    """What the coordinator asks, once per request."""

    def plan(self, *, block_size: int, n_left: int, is_solo: bool) -> RoundPlan:
        """Plan the next round.

        Args:
            block_size: B of the drafter at hand, anchor included; below 2 there is none.
            n_left: tokens the request may still get, at least 1.
            is_solo: no other session is at work on the target.
        """
        ...

    def choose(self, confidences: Sequence[float], *, draft_ms: float, n_left: int) -> int:
        """Rows to verify of the block that came, 1..len(confidences)+1."""
        ...

    def price_copy(self, copy: Copy, *, n_left: int) -> int:
        """Rows to verify of a copy at hand, before `plan`; 1: it is not worth it, so plan."""
        ...

    def observe(self, result: RoundResult) -> None:
        """Learn from a finished round."""
        ...


class Off:
    """Never drafts.

    Args:
        costs: learn from its plain rounds, when given; the requests that do draft compare with
            them.
    """

    def __init__(self, costs: TargetCosts | None = None) -> None:
        self._costs = costs
        self._last_rows = 0

    def plan(self, *, block_size: int, n_left: int, is_solo: bool) -> RoundPlan:
        """A plain round."""
        return RoundPlan(0, "off")

    def choose(self, confidences: Sequence[float], *, draft_ms: float, n_left: int) -> int:
        """One row."""
        return 1

    def price_copy(self, copy: Copy, *, n_left: int) -> int:
        """One row."""
        return 1

    def observe(self, result: RoundResult) -> None:
        """Feed the plain cost."""
        if self._costs is not None:
            self._costs.count_round()
            if result.is_solo and self._last_rows == 1:
                self._costs.sample_plain(result.wall_ms)
        self._last_rows = result.rows


class Fixed:
    """Drafts every round and keeps the whole block."""

    def plan(self, *, block_size: int, n_left: int, is_solo: bool) -> RoundPlan:
        """A whole block, unless there is no drafter or no room for a draft."""
        return _whole_block(block_size, n_left)

    def choose(self, confidences: Sequence[float], *, draft_ms: float, n_left: int) -> int:
        """All rows that can still be emitted."""
        return _most_rows(confidences, n_left)

    def price_copy(self, copy: Copy, *, n_left: int) -> int:
        """All of it, where agreement is long."""
        return _most_rows(copy.ids, n_left) if copy.suffix_len >= LONG_SUFFIX else 1

    def observe(self, result: RoundResult) -> None:
        """Nothing to learn."""


class Adaptive:
    """Drafts while it pays, as many rows as pay, and never loses more than its budget.

    Args:
        costs: shared by all requests of the target.
        is_width_free: False keeps as many rows as the budget allows, without looking at this
            block's confidences. Residual acceptance needs that: which drafts are verified must
            not depend on the drafts themselves.
    """

    def __init__(self, costs: TargetCosts, *, is_width_free: bool = True) -> None:
        self._costs = costs
        self._is_width_free = is_width_free
        self._gate = DraftGate()
        self._caution = Caution()
        self._budget = LossBudget()
        self._copies = CopyStats()
        self._is_returning = False  # the last round was kept plain by gate or budget
        self._last_rows = 0

    def plan(self, *, block_size: int, n_left: int, is_solo: bool) -> RoundPlan:
        """Draft when the plain cost is known, unless gate, caution or budget object."""
        plan = _whole_block(block_size, n_left)
        if not plan.draft:
            return plan
        if is_solo and self._costs.wants_plain:
            return RoundPlan(0, "measuring")
        if not self._gate.should_draft():
            self._is_returning = True
            return RoundPlan(0, "gate")
        if self._caution.should_wait():
            return RoundPlan(0, "unsure")
        if not self._can_afford():
            self._is_returning = True
            return RoundPlan(0, "budget")
        self._is_returning = False
        return plan

    def choose(self, confidences: Sequence[float], *, draft_ms: float, n_left: int) -> int:
        """The chooser's rows, or fewer where losing them all would break the promise."""
        spent_ms = min(draft_ms, float(STALL_HIGH) * (self._costs.draft_ms or draft_ms))
        cap = self._affordable_rows(_most_rows(confidences, n_left), spent_ms)
        if not self._is_width_free:
            return cap
        survival = self._costs.calibration.probabilities(confidences)
        return choose_rows(survival, self._costs.ladder, max_rows=cap).rows

    def price_copy(self, copy: Copy, *, n_left: int) -> int:
        """As `choose`, with the rate at which such copies survived; no drafter is asked for it."""
        if self._copies.is_silent or not self._is_width_free:
            return 1
        cap = self._affordable_rows(_most_rows(copy.ids, n_left), 0.0)
        survival = [self._copies.probability(copy.suffix_len)] * len(copy.ids)
        return choose_rows(survival, self._costs.ladder, max_rows=cap).rows

    def observe(self, result: RoundResult) -> None:
        """Feed gate, budgets, calibration and costs."""
        self._costs.count_round()
        if result.copy_suffix_len:
            loss_ms = self._observe_copy(result)
        else:
            self._copies.count_round()
            is_drafted = result.is_drafted
            loss_ms = self._observe_draft(result) if is_drafted else self._observe_plain(result)
            if is_drafted:
                self._caution.record_draft(loss_ms)
        self._caution.record_anchor(result.certainty)
        for budget in (self._budget, self._costs.budget):
            budget.record(loss_ms, 1 + result.n_accepted)
        self._last_rows = result.rows

    def _can_afford(self) -> bool:
        """Whether a draft and the narrowest verify of it may be lost whole.

        The shared budget keeps short requests from starting over again and again at the cost of
        the run; it postpones probes only, so that every request gets to show what it is worth.
        """
        ladder = self._costs.ladder
        narrow_ms = max(self._costs.draft_ms + ladder.ms(2) - ladder.plain_ms, 1e-6)
        if self._budget.is_postponed(ladder.plain_ms) or self._left_ms() < narrow_ms:
            return False
        is_probe = self._is_returning and not self._is_in_credit()
        return not is_probe or self._costs.budget.left_ms(ladder.plain_ms) >= narrow_ms

    def _is_in_credit(self) -> bool:
        plain_ms = self._costs.ladder.plain_ms
        return any(b.is_in_credit(plain_ms) for b in (self._budget, self._costs.budget))

    def _left_ms(self) -> float:
        plain_ms = self._costs.ladder.plain_ms
        return self._budget.left_ms(plain_ms, is_in_credit=self._is_in_credit())

    def _affordable_rows(self, rows: int, spent_ms: float) -> int:
        """At most `rows`, and no more than may all be lost after `spent_ms`."""
        ladder = self._costs.ladder
        left_ms = self._left_ms() - spent_ms + ladder.plain_ms
        while rows > 1 and ladder.ms(rows) > left_ms:
            rows -= 1
        return rows

    def _observe_copy(self, result: RoundResult) -> float:
        if not result.is_final:
            n_drafts = result.rows - 1
            self._copies.observe(result.copy_suffix_len, n_drafts, result.n_accepted)
        return result.wall_ms - (1 + result.n_accepted) * self._costs.plain_ms

    def _observe_plain(self, result: RoundResult) -> float:
        if result.is_solo and self._last_rows == 1:
            self._costs.sample_plain(result.wall_ms)
        return 0.0

    def _observe_draft(self, result: RoundResult) -> float:
        gain_ms = (1 + result.n_accepted) * self._costs.plain_ms
        self._costs.sample_draft(result.draft_ms)
        wall_ms = self._costs.without_stall(result.rows, result.wall_ms)
        self._gate.record(gain_ms, wall_ms)
        if result.is_solo:
            self._costs.sample_verify(result.rows, result.wall_ms - result.draft_ms)
        reached = min(result.n_accepted + (not result.is_final), result.rows - 1)
        if self._is_width_free:  # else drafts were drawn: the calibration is of the best ones
            self._costs.calibration.observe(result.confidences[:reached], result.n_accepted)
        return wall_ms - gain_ms


def _whole_block(block_size: int, n_left: int) -> RoundPlan:
    if block_size < 2:
        return RoundPlan(0, "no_drafter")
    if n_left < 2:
        return RoundPlan(0, "last_token")
    return RoundPlan(min(block_size, MAX_ROWS) - 1)


def _most_rows(drafts: Sequence[float], n_left: int) -> int:
    return max(1, min(len(drafts) + 1, n_left, MAX_ROWS))
