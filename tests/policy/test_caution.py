"""After lost drafts, the next one waits for an anchor that the target was sure of."""

import random

import pytest

from common.policy.caution import MOST_WAITS, SURE, Caution
from common.policy.costs import TargetCosts
from common.policy.ladder import CostLadder
from common.policy.policy import Adaptive, Off, RoundResult

PLAIN_MS = 10.0
DRAFT_MS = 5.0
LADDER = CostLadder.measured([PLAIN_MS * (1 + 0.05 * row) for row in range(8)])


def waits(caution, certainty=0.5):
    """Plain rounds until it lets a draft through."""
    count = 0
    caution.record_anchor(certainty)
    while caution.should_wait():
        count += 1
        caution.record_anchor(certainty)
    return count


def test_at_first_and_after_a_win_nothing_waits():
    caution = Caution()
    assert waits(caution) == 0
    caution.record_draft(-5.0)
    assert waits(caution) == 0


def test_losses_in_a_row_double_the_longest_wait():
    caution = Caution()
    longest = []
    for _ in range(6):
        caution.record_draft(7.0)
        longest.append(waits(caution))
    assert longest == [1, 2, 4, 8, MOST_WAITS, MOST_WAITS]


def test_a_win_ends_the_row():
    caution = Caution()
    for loss_ms in (7.0, 7.0, -1.0, 7.0):
        caution.record_draft(loss_ms)
    assert waits(caution) == 1


@pytest.mark.parametrize(("certainty", "n_waits"), [(SURE, 0), (1.0, 0), (SURE - 1e-6, 4)])
def test_a_sure_anchor_ends_the_wait(certainty, n_waits):
    caution = Caution()
    for _ in range(3):
        caution.record_draft(7.0)
    assert waits(caution, certainty) == n_waits


def simulated(certainty_of, *, is_told, n_rounds=2000, seed=5):
    """Texts in which drafts live behind sure anchors and die behind the others, in stretches."""
    rng = random.Random(seed)
    costs = TargetCosts(LADDER.rungs_ms)
    policy = Adaptive(costs)
    wall_ms, tokens, plain, is_clear = 0.0, 0, 0, True
    for _ in range(n_rounds):
        plan = policy.plan(block_size=8, n_left=10_000, is_solo=True)
        n_alive = rng.choice((3, 5, 7)) if is_clear else 0
        is_clear = rng.random() < (0.8 if is_clear else 0.25)
        certainty = certainty_of(is_clear) if is_told else 1.0
        if not plan.draft:
            result = RoundResult(False, 1, 0, PLAIN_MS, certainty=certainty)
        else:
            confidences = (0.9,) * plan.n_drafts
            rows = policy.choose(confidences, draft_ms=DRAFT_MS, n_left=10_000)
            kept = min(n_alive, rows - 1)
            ms = DRAFT_MS + LADDER.ms(rows)
            result = RoundResult(True, rows, kept, ms, DRAFT_MS, confidences, certainty=certainty)
        policy.observe(result)
        wall_ms += result.wall_ms
        tokens += 1 + result.n_accepted
        plain += not result.is_drafted
    return PLAIN_MS * tokens / wall_ms, plain / n_rounds


def test_doubt_of_the_target_saves_drafts_that_would_be_lost():
    """The same text, once with the target's doubt told and once without."""
    told, _ = simulated(lambda is_clear: 0.99 if is_clear else 0.4, is_told=True)
    untold, _ = simulated(lambda is_clear: 0.99, is_told=False)
    assert told > 1.1 * untold


def test_doubt_without_meaning_costs_little():
    """A target that is never sure is drafted for all the same."""
    told, _ = simulated(lambda is_clear: 0.4, is_told=True)
    untold, _ = simulated(lambda is_clear: 0.99, is_told=False)
    assert told > 0.85 * untold


def test_a_plain_policy_ignores_it():
    policy = Off()
    policy.observe(RoundResult(False, 1, 0, PLAIN_MS, certainty=0.1))
    assert policy.plan(block_size=8, n_left=10, is_solo=True).reason == "off"


def test_the_plan_names_the_reason():
    policy = Adaptive(TargetCosts(LADDER.rungs_ms))
    plan = policy.plan(block_size=8, n_left=100, is_solo=True)
    while not plan.draft:
        policy.observe(RoundResult(False, 1, 0, PLAIN_MS))
        plan = policy.plan(block_size=8, n_left=100, is_solo=True)
    lost = RoundResult(True, 2, 0, 16.0, DRAFT_MS, (0.5,) * plan.n_drafts, certainty=0.2)
    policy.observe(lost)
    reasons = [policy.plan(block_size=8, n_left=100, is_solo=True).reason for _ in range(3)]
    assert "unsure" in reasons
