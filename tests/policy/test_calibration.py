"""Confidence becomes probability in twelve float32 bins."""

import numpy as np
import pytest

from common.policy.calibration import PUBLISHED, Calibration, Prior, bins_of, priors


@pytest.mark.parametrize(
    ("confidence", "index"),
    [(0.0, 0), (0.5, 1), (0.88, 3), (0.9, 3), (0.99, 8), (0.999, 11), (1.0, 11)],
)
def test_bins_are_those_of_float32(confidence, index):
    """In float64, 0.9 leaves the bin of 0.88, and 0.99 falls into bin 7."""
    assert bins_of([confidence]) == [index]


def test_bins_differ_in_float64():
    """Shows that the edges above can fail: the same formula in float64."""
    assert [int(4 * -np.log10(1 - c)) for c in (0.9, 0.99)] == [4, 7]


@pytest.mark.parametrize(("confidence", "index"), [(-3.0, 0), (float("nan"), 0), (7.0, 11)])
def test_confidence_outside_its_range_is_clipped(confidence, index):
    """A lying drafter must not index past the table."""
    assert bins_of([confidence]) == [index]


@pytest.mark.parametrize(("confidence", "expected"), [(0.9, 0.606), (0.2, 0.269)])
def test_prior_before_any_observation(confidence, expected):
    """The first rounds of a model rest on it alone."""
    assert priors([confidence])[0] == pytest.approx(expected, abs=0.02)
    assert Calibration().probabilities([confidence])[0] == pytest.approx(expected, abs=0.02)


def test_rejections_lower_their_bin_only():
    """Learning about sure drafts must not spoil unsure ones."""
    calibration = Calibration()
    before = calibration.probabilities([0.2])[0]
    for _ in range(40):
        calibration.observe([0.9], 0)
    assert calibration.probabilities([0.9])[0] < 0.3
    assert calibration.probabilities([0.88])[0] < 0.3
    assert calibration.probabilities([0.2])[0] == before


def test_the_past_fades():
    """A request that turns from copying to prose must be noticed."""
    calibration = Calibration()
    for _ in range(80):
        calibration.observe([0.7], 1)
    assert calibration.probabilities([0.7])[0] > 0.9
    for _ in range(80):
        calibration.observe([0.7], 0)
    assert calibration.probabilities([0.7])[0] < 0.2


def test_a_drafter_brings_its_own_prior():
    """A prior fitted for one pair and used for another, or told and never used."""
    told = Prior.from_notes({"prior_intercept": -1.5, "prior_slope": 2, "blas": "x"})
    assert told == Prior(-1.5, 2.0)
    fitted = Calibration(told).probabilities([0.9])[0]
    assert fitted == pytest.approx(1 / (1 + np.exp(1.5 - 2.0)), abs=1e-6)
    assert fitted != Calibration().probabilities([0.9])[0]


@pytest.mark.parametrize(
    "notes",
    [
        {},
        {"prior_intercept": 1.0},
        {"prior_intercept": "x", "prior_slope": 1.0},
        {"prior_intercept": float("nan"), "prior_slope": 1.0},
    ],
)
def test_without_two_numbers_the_published_prior_stays(notes):
    """A NaN prior would choose one row for ever."""
    assert Prior.from_notes(notes) == PUBLISHED
