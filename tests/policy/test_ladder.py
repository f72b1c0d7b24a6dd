"""Rows are chosen by tokens per millisecond on the published ladder."""

import doctest
from itertools import pairwise

import pytest

from common.errors import ConfigError
from common.policy import calibration, ladder
from common.policy.ladder import CostLadder, choose_rows

PRIOR = CostLadder.prior(17.7)


def test_published_rungs_are_interpolated():
    """A wrong rung between two points shifts every choice near it."""
    expected = [17.7, 25.5, 29.6, 33.6, 36.8, 42.4, 44.8, 47.9, 51.1, 54.23, 57.37, 60.5]
    assert PRIOR.rungs_ms == pytest.approx([*expected, 62.65, 64.8, 66.95, 69.1], abs=0.01)


def test_ladder_never_decreases():
    """A rung cheaper than the one below would make the chooser leap over it."""
    rungs = PRIOR.rungs_ms
    assert all(low <= high for low, high in pairwise(rungs))


def test_half_the_plain_cost_halves_every_rung():
    """Only the scale is learned, never the shape."""
    half = CostLadder.prior(17.7 / 2)
    assert half.rungs_ms == pytest.approx([ms / 2 for ms in PRIOR.rungs_ms], rel=1e-6)


@pytest.mark.parametrize(
    ("probabilities", "rows"),
    [
        ([0.3, 0.2, *[0.1] * 5], 1),
        ([0.40], 1),
        ([0.4700], 1),
        ([0.4705], 2),
        ([0.60], 2),
        ([0.95, 0.05, 0.99, 0.99], 2),
        ([0.96] * 7, 8),
        ([0.98] * 15, 16),
        ([], 1),
    ],
)
def test_rows_on_the_published_ladder(probabilities, rows):
    """The published facts of the chooser."""
    assert choose_rows(probabilities, PRIOR).rows == rows


def test_choice_tells_tokens_and_cost():
    """The stats line and the budget read both."""
    choice = choose_rows([0.96] * 7, PRIOR)
    assert choice.tokens == pytest.approx(6.965, abs=0.01)
    assert choice.ms == pytest.approx(47.9, abs=0.01)


@pytest.mark.parametrize(("second", "rows"), [(0.0958, 2), (0.5, 3)])
def test_a_row_must_buy_two_per_cent(second, rows):
    """Rows that buy 1.5 % would be taken and given back with every flicker."""
    costs = CostLadder((10, 12, 12.2, *[20] * 13))
    assert choose_rows([0.5, second], costs).rows == rows


def test_odd_probabilities_still_answer():
    """NaN from a drafter's overflow once took the chooser down."""
    assert choose_rows([float("nan"), 0.9, 0.9], PRIOR).rows == 1
    assert choose_rows([float("inf"), -1.0], PRIOR).rows == 2


def test_more_than_fifteen_drafts_are_cut():
    """A sixteenth draft ran past the table."""
    assert choose_rows([1.0] * 40, PRIOR).rows == 16


def test_rows_stay_under_the_cap():
    """The last tokens of a request must not be overshot."""
    assert choose_rows([1.0] * 7, PRIOR, max_rows=3).rows == 3


def test_measured_ladder_keeps_its_own_shape_without_stalls():
    """A first row measured cold made every wider one look free."""
    measured = CostLadder.measured([18, 14, 13, 15])
    assert measured.rungs_ms[:4] == pytest.approx((13, 13, 13, 15))
    assert measured.ms(8) == pytest.approx(15 * 47.9 / 33.6, rel=1e-5)


@pytest.mark.parametrize("times", [[], [1.0] * 17, [1.0, float("nan")], [0.0], [-1.0]])
def test_impossible_measurement_is_refused(times):
    """A zero rung would price rows as free."""
    with pytest.raises(ConfigError, match="measured ladder"):
        CostLadder.measured(times)


def test_ladder_of_the_wrong_length_is_refused():
    """A short ladder would end in an index error in the middle of a round."""
    with pytest.raises(ConfigError, match="16"):
        CostLadder((1.0, 2.0))


@pytest.mark.parametrize("module", [ladder, calibration])
def test_examples_in_the_docstrings_hold(module):
    """Examples that nobody runs go stale."""
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
