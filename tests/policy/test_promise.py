"""Whatever the drafter does, no window of 64 rounds takes more than 1.05 of plain time."""

import random
from itertools import pairwise

import pytest

from common.policy.costs import TargetCosts
from common.policy.ladder import CostLadder
from common.policy.policy import Adaptive, RoundResult

WINDOW = 64
PLAIN_MS = 10.0
LADDERS = {
    "published": CostLadder.prior(PLAIN_MS),
    "flat": CostLadder.measured([PLAIN_MS * (1 + 0.02 * row) for row in range(16)]),
    "steep": CostLadder.measured([PLAIN_MS * (1 + 0.5 * row) for row in range(16)]),
}


def geometric(share):
    def lengths(_, rng):
        n = 0
        while rng.random() < share:
            n += 1
        return n

    return lengths


ACCEPTANCE = {
    "never": lambda _, rng: 0,
    "always": lambda _, rng: 15,
    "dull": geometric(0.3),
    "fair": geometric(0.6),
    "good": geometric(0.85),
    "turns hostile": lambda index, rng: 15 if index < 200 else 0,
    "bursts": lambda index, rng: 15 if index // 40 % 2 == 0 else 0,
    "alternates": lambda index, rng: 15 * (index % 2),
    "only probes win": lambda index, rng: 15 if index % 17 == 0 else 0,
}


def simulated(accept, ladder, draft_ms, confidence, *, n_rounds=300, n_requests=1, seed=1):
    """Run the policy against exact costs; returns (wall ms, tokens, rows asked for) by round."""
    rng = random.Random(seed)
    costs = TargetCosts(ladder.rungs_ms)
    rounds = []
    for _ in range(n_requests):
        policy = Adaptive(costs)
        for _ in range(n_rounds):
            rounds.append(one_round(policy, accept(len(rounds), rng), ladder, draft_ms, confidence))
    return rounds


def one_round(policy, n_accepted, ladder, draft_ms, confidence):
    plan = policy.plan(block_size=16, n_left=10_000, is_solo=True)
    if not plan.draft:
        policy.observe(RoundResult(False, 1, 0, ladder.ms(1)))
        return ladder.ms(1), 1, 0
    confidences = (confidence,) * plan.n_drafts
    rows = policy.choose(confidences, draft_ms=draft_ms, n_left=10_000)
    accepted = min(n_accepted, rows - 1)
    wall_ms = draft_ms + ladder.ms(rows)
    policy.observe(RoundResult(True, rows, accepted, wall_ms, draft_ms, confidences))
    return wall_ms, accepted + 1, rows


def worst_window(rounds):
    """Largest time of 64 rounds over the plain time of their tokens."""
    spent, earned = [0.0], [0.0]
    for wall_ms, tokens, _ in rounds:
        spent.append(spent[-1] + wall_ms)
        earned.append(earned[-1] + tokens * PLAIN_MS)
    ends = range(WINDOW, len(rounds) + 1)
    return max((spent[i] - spent[i - WINDOW]) / (earned[i] - earned[i - WINDOW]) for i in ends)


@pytest.mark.parametrize("draft_ms", [1.0, 5.0, 10.0])
@pytest.mark.parametrize("ladder", LADDERS.values(), ids=LADDERS)
@pytest.mark.parametrize("accept", ACCEPTANCE.values(), ids=ACCEPTANCE)
def test_no_window_takes_more_than_five_per_cent_longer(accept, ladder, draft_ms):
    """The user must never pay for speculation; confidences lie here on purpose."""
    rounds = simulated(accept, ladder, draft_ms, confidence=0.95)
    assert any(rows > 1 for _, _, rows in rounds)
    assert worst_window(rounds) <= 1.05


def test_the_promise_holds_across_short_requests():
    """Every request starting over with a losing draft would add up."""
    rounds = simulated(
        ACCEPTANCE["never"], LADDERS["published"], 3.0, 0.95, n_rounds=32, n_requests=12
    )
    assert worst_window(rounds) <= 1.05


def test_without_the_budget_the_promise_breaks(monkeypatch):
    """Shows that the tests above can fail: the gate alone does not keep the promise."""
    monkeypatch.setattr("common.policy.budget.POSTPONE_SHARE", 1.0)
    monkeypatch.setattr("common.policy.budget.PROMISE_SHARE", 1.0)
    rounds = simulated(ACCEPTANCE["turns hostile"], LADDERS["published"], 5.0, 0.95)
    assert worst_window(rounds) > 1.05


@pytest.mark.parametrize(("name", "least"), [("published", 2.0), ("flat", 4.0)])
def test_drafts_that_pay_are_used(name, least):
    """A budget that never lets anything through keeps any promise."""
    rounds = simulated(ACCEPTANCE["always"], LADDERS[name], 2.0, 0.95)
    ms = sum(wall_ms for wall_ms, _, _ in rounds)
    assert PLAIN_MS * sum(tokens for _, tokens, _ in rounds) / ms > least
    assert sum(rows > 1 for _, _, rows in rounds) > 270


def test_rows_narrow_as_the_budget_runs_out():
    """After a full loss there is room for a narrow block only."""
    rounds = simulated(ACCEPTANCE["never"], LADDERS["published"], 1.0, 0.99)
    rows = [rows for _, _, rows in rounds if rows]
    assert any(later < earlier for earlier, later in pairwise(rows))


def test_one_stall_does_not_keep_drafts_out():
    """A busy moment of the machine is no proof against drafting; plain rounds stall as well."""
    ladder = LADDERS["flat"]
    costs = TargetCosts(ladder.rungs_ms)
    policy = Adaptive(costs)
    rng = random.Random(3)
    for _ in range(40):
        one_round(policy, ACCEPTANCE["good"](0, rng), ladder, 2.0, 0.9)

    plan = policy.plan(block_size=16, n_left=10_000, is_solo=True)
    rows = policy.choose((0.9,) * plan.n_drafts, draft_ms=2.0, n_left=10_000)
    policy.observe(RoundResult(True, rows, rows - 1, 400.0, 2.0, (0.9,) * plan.n_drafts))
    after = [one_round(policy, ACCEPTANCE["good"](0, rng), ladder, 2.0, 0.9) for _ in range(20)]

    assert plan.draft
    assert sum(rows > 1 for _, _, rows in after) > 15
