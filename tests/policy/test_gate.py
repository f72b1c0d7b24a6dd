"""The plain cost follows slowly; the gate backs off while drafting loses."""

import pytest

from common.policy.gate import DraftGate, PlainCost


def fed(samples, start_ms=17.7):
    cost = PlainCost(start_ms)
    for ms in samples:
        cost.sample(ms)
    return cost.ms


def test_one_stall_hardly_moves_the_plain_cost():
    """A stall of 400 ms would make every drafted round look like a gain."""
    assert fed([400.0]) == pytest.approx(18.14, abs=0.01)


@pytest.mark.parametrize(("ms", "low", "high"), [(14.0, 14.0, 14.5), (22.0, 21.0, 22.0)])
def test_plain_cost_arrives_after_eighty_rounds(ms, low, high):
    """The estimate must follow a machine that throttles or recovers."""
    assert low <= fed([ms] * 80) <= high


@pytest.mark.parametrize("ms", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_times_are_ignored(ms):
    """One NaN would stay in the average for ever."""
    assert fed([ms]) == pytest.approx(17.7)


def answers(gate, n):
    return [gate.should_draft() for _ in range(n)]


def test_losing_for_ever_doubles_the_plain_rounds_up_to_thirty_two():
    """A hopeless drafter must cost less and less."""
    gate = DraftGate()
    owed = []
    for _ in range(8):
        while not gate.should_draft():
            pass
        gate.record(5.0, 10.0)
        owed.append(gate.owed)
    assert owed == [1, 2, 4, 8, 16, 32, 32, 32]


def test_skips_and_probes_are_counted():
    """The stats line shows how often the gate held back."""
    gate = DraftGate()
    assert answers(gate, 1) == [True]
    gate.record(5.0, 10.0)
    assert answers(gate, 2) == [False, True]
    assert (gate.n_skipped, gate.n_probes) == (1, 1)


def test_mixed_rounds_that_pay_on_the_whole_never_stop_drafting():
    """The average of ratios would stop here; the ratio of averages does not."""
    gate = DraftGate()
    for gain_ms, wall_ms in [(70, 40), (18, 40), (120, 45)] * 4:
        assert gate.should_draft()
        gate.record(gain_ms, wall_ms)


def test_one_dry_round_after_six_good_ones_does_not_stop():
    """Sticky gates tripped on a single dry opening."""
    gate = DraftGate()
    for gain_ms in [25] * 6 + [6]:
        gate.record(gain_ms, 10)
    assert gate.should_draft()


def test_a_win_clears_all_debt():
    """After a win there is nothing to owe."""
    gate = DraftGate()
    for _ in range(4):
        gate.record(6, 10)
    assert gate.owed > 0
    gate.record(60, 10)
    assert gate.owed == 0
    assert gate.should_draft()
