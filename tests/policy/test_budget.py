"""The worst run of losses within 64 rounds decides, not their sum with earlier wins."""

import pytest

from common.policy.budget import LossBudget


def budget_of(*losses_ms):
    budget = LossBudget()
    for loss_ms in losses_ms:
        budget.record(loss_ms)
    return budget


def test_earlier_wins_do_not_pay_for_later_losses():
    """A window that starts at the first loss sees no win."""
    assert budget_of(-100.0, 5.0, 6.0).worst_ms == pytest.approx(11.0)


def test_later_wins_do_pay():
    """A window that contains the losses contains what followed them."""
    assert budget_of(5.0, -3.0).worst_ms == pytest.approx(2.0 + 0.0)


def test_losses_leave_with_the_window():
    """A request that lost long ago gets to try again."""
    assert budget_of(5.0, *[0.0] * 62).worst_ms == pytest.approx(5.0)
    assert budget_of(5.0, *[0.0] * 63).worst_ms == 0.0


def test_no_draft_starts_above_four_per_cent():
    """4 % of 64 plain rounds of 10 ms are 25.6 ms."""
    assert budget_of(25.0).left_ms(10.0) > 0
    assert budget_of(26.0).left_ms(10.0) == 0.0
