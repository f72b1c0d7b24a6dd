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
    """64 rounds that lose 26.67 ms to plain ones of 10 ms take 666.7 ms, 4 % of which they lose."""
    assert not budget_of(26.6).is_postponed(10.0)
    assert budget_of(26.7).is_postponed(10.0)


def test_tokens_raise_what_may_be_lost():
    """The promise is a share of the plain time of the window's tokens, not of its rounds."""
    budget = LossBudget()
    budget.record(20.0, 3)  # 64 rounds now hold at least 66 tokens
    budget.record(-1.0, 1)

    assert budget.left_ms(10.0) == pytest.approx(0.049 * 660 - 19.0, rel=1e-4)


def test_the_tightest_run_of_rounds_decides():
    """Tokens of rounds before the losses do not count for a window that starts at the losses."""
    budget = LossBudget()
    budget.record(-1.0, 15)
    budget.record(20.0, 1)

    assert budget.left_ms(10.0) == pytest.approx(0.049 * 640 - 20.0, rel=1e-4)


def test_in_credit_a_win_clears_the_slate():
    """Unlucky rounds among many lucky ones must not keep drafts out for 64 rounds."""
    budget = budget_of(*[-20.0] * 10, 12.0, -1.0, 12.0)

    assert budget.is_in_credit(10.0)
    assert budget.left_ms(10.0) == pytest.approx(0.049 * 640 - 23.0, rel=1e-4)
    assert budget.left_ms(10.0, is_in_credit=True) == pytest.approx(0.049 * 640 - 12.0, rel=1e-4)


def test_a_row_of_losses_stops_drafting_in_credit_too():
    """A drafter that turns hostile gets no more than the promise."""
    budget = budget_of(*[-50.0] * 40, 13.0, 18.4)

    assert budget.is_in_credit(10.0)
    assert budget.left_ms(10.0, is_in_credit=True) == 0.0


def test_a_young_request_is_not_in_credit():
    """Nothing was won yet."""
    assert not budget_of().is_in_credit(10.0)
    assert not budget_of(5.0, -1.0).is_in_credit(10.0)
