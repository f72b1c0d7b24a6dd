"""The policy asks its parts in order and learns only from what was measured cleanly."""

import pytest

from common.policy.costs import TargetCosts
from common.policy.ladder import CostLadder
from common.policy.policy import Adaptive, Fixed, Off, RoundResult

LADDER = CostLadder.prior(10.0).rungs_ms


def plain(ms=10.0, **changes):
    return RoundResult(is_drafted=False, rows=1, n_accepted=0, wall_ms=ms, **changes)


def drafted(rows, n_accepted, wall_ms, confidences=(), **changes):
    return RoundResult(True, rows, n_accepted, wall_ms, confidences=tuple(confidences), **changes)


def warmed(**changes):
    """A policy whose plain cost is confirmed, so that it may draft."""
    costs = TargetCosts(LADDER)
    for _ in range(2):
        costs.sample_plain(10.0)
    return costs, Adaptive(costs, **changes)


def ask(policy, *, block_size=8, n_left=100, is_solo=True):
    return policy.plan(block_size=block_size, n_left=n_left, is_solo=is_solo)


def test_off_never_drafts():
    """`--no-draft` must not reach a drafter through the policy."""
    assert not ask(Off()).draft
    assert Off().choose([1.0] * 7, draft_ms=0.0, n_left=100) == 1


def test_fixed_keeps_the_whole_block_every_round():
    """Benchmarks that are not about the policy need one width."""
    policy = Fixed()
    for _ in range(5):
        assert ask(policy).n_drafts == 7
        assert policy.choose([0.0] * 7, draft_ms=0.0, n_left=100) == 8
        policy.observe(drafted(8, 0, 1000.0))


@pytest.mark.parametrize("policy", [Fixed(), warmed()[1]], ids=["fixed", "adaptive"])
def test_no_draft_without_a_drafter_or_room(policy):
    """A draft for the very last token is thrown away whole."""
    assert ask(policy, block_size=0).reason == "no_drafter"
    assert ask(policy, n_left=1).reason == "last_token"


@pytest.mark.parametrize("policy", [Fixed(), warmed()[1]], ids=["fixed", "adaptive"])
def test_rows_never_exceed_what_may_still_be_emitted(policy):
    """max_tokens was overshot after state had been committed."""
    assert policy.choose([0.99] * 7, draft_ms=0.0, n_left=3) <= 3


def test_the_widest_block_has_fifteen_drafts():
    """A drafter with a block of 32 must not ask for 31."""
    assert ask(Fixed(), block_size=32).n_drafts == 15


def test_adaptive_measures_plain_rounds_before_it_drafts():
    """Without a plain cost, every gain is a guess."""
    policy = Adaptive(TargetCosts(LADDER))
    plans = []
    for _ in range(4):
        plans.append(ask(policy))
        policy.observe(plain())
    assert [plan.reason for plan in plans] == ["measuring"] * 3 + [""]


def test_plain_cost_starts_at_the_median_of_what_was_seen():
    """A start-up measurement on a busy machine was twice too long."""
    costs = TargetCosts([20.0])
    costs.sample_plain(10.0)
    costs.sample_plain(10.4)
    assert costs.plain_ms == pytest.approx(10.4)


def test_company_does_not_move_the_plain_cost():
    """Contention only adds time."""
    costs, policy = warmed()
    for _ in range(5):
        policy.observe(plain(50.0, is_solo=False))
    assert costs.plain_ms == pytest.approx(10.0)


def test_first_round_after_a_change_of_rows_does_not_move_the_plain_cost():
    """Its time contains a kernel being compiled."""
    costs, policy = warmed()
    policy.observe(plain(50.0))
    policy.observe(drafted(8, 7, 20.0))
    policy.observe(plain(50.0))
    assert costs.plain_ms == pytest.approx(10.0)
    policy.observe(plain(12.0))
    assert costs.plain_ms == pytest.approx(10.2)


def test_winning_for_ever_still_confirms_the_plain_cost():
    """A plain cost measured in a busy minute would hide a loss for ever."""
    _, policy = warmed()
    plans = []
    for _ in range(300):
        plan = ask(policy)
        plans.append(plan)
        policy.observe(drafted(8, 7, LADDER[7]) if plan.draft else plain())
    measuring = [index for index, plan in enumerate(plans) if plan.reason == "measuring"]
    assert len(measuring) == 4
    assert sum(plan.draft for plan in plans) == 296


def test_noise_cannot_hold_up_drafting_for_ever():
    """Samples that never agree ended in plain rounds only."""
    costs, policy = warmed()
    for index in range(200):
        policy.observe(plain(5.0 if index % 2 else 20.0))
    assert not costs.wants_plain or ask(policy).reason == "measuring"
    assert sum(_plan_and_observe(policy, index).draft for index in range(200)) > 100


def _plan_and_observe(policy, index):
    plan = ask(policy)
    policy.observe(drafted(8, 7, 20.0) if plan.draft else plain(5.0 if index % 2 else 20.0))
    return plan


def test_verifies_far_below_their_rung_have_the_plain_cost_measured_afresh():
    """A plain cost from a busy minute made every losing round look like a gain."""
    costs, policy = warmed()
    for _ in range(40):
        policy.observe(drafted(2, 0, 8.0))
    assert ask(policy).reason == "measuring"
    for _ in range(4):
        policy.observe(plain(5.0))
    assert costs.plain_ms == pytest.approx(5.0)
    assert not costs.wants_plain


def test_requests_without_drafts_teach_the_plain_cost():
    """They are what drafting is compared with."""
    costs, _ = warmed()
    policy = Off(costs)
    for _ in range(3):
        policy.observe(plain(12.0))
    assert costs.plain_ms == pytest.approx(10.2 + 0.18)


def test_confident_blocks_are_kept_and_doubtful_ones_cut():
    """The chooser must see calibrated confidences of this block."""
    _, policy = warmed()
    assert policy.choose([0.999] * 7, draft_ms=1.0, n_left=100) == 8
    assert policy.choose([0.2] * 7, draft_ms=1.0, n_left=100) == 1


def test_width_is_not_chosen_where_it_would_bias_the_draws():
    """Residual acceptance stays exact only if kept slots do not depend on the drafts."""
    _, policy = warmed(is_width_free=False)
    widths = {policy.choose([c] * 7, draft_ms=1.0, n_left=100) for c in (0.01, 0.5, 0.999)}
    assert widths == {8}


def test_only_reached_drafts_teach_the_calibration():
    """Drafts behind a rejection were never judged."""
    costs, policy = warmed()
    before = costs.calibration.probabilities([0.95, 0.5, 0.1])
    policy.observe(drafted(4, 1, 20.0, [0.95, 0.5, 0.1]))
    after = costs.calibration.probabilities([0.95, 0.5, 0.1])
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert after[2] == before[2]


def test_the_cut_at_the_end_of_a_request_is_no_rejection():
    """max_tokens ends an accepted prefix without saying anything about the next draft."""
    costs, policy = warmed()
    before = costs.calibration.probabilities([0.5])[0]
    policy.observe(drafted(4, 1, 20.0, [0.95, 0.5, 0.1], is_final=True))
    assert costs.calibration.probabilities([0.5])[0] == before


def test_a_draft_that_never_came_closes_the_gate():
    """A dead-slow drafter would add its deadline to every round."""
    _, policy = warmed()
    assert ask(policy).draft
    policy.observe(drafted(1, 0, 12.0, draft_ms=2.0))
    assert ask(policy).reason == "gate"


def test_every_request_may_show_what_its_drafts_are_worth():
    """One hostile text must not silence the next request."""
    costs, first = warmed()
    for _ in range(20):
        first.observe(drafted(8, 0, 40.0))
    assert ask(Adaptive(costs)).draft
