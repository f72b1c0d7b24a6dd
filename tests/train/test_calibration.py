"""The report speaks of the same bins and the same published prior as the round policy."""

import pytest

pytest.importorskip("torch", reason="torch (extra `train`) is not installed")

import numpy as np

from common.policy import calibration as policy
from drafter_svc.train.calibration import PUBLISHED, Outcomes, bins_of, chance, refit, table

GRID = np.concatenate([np.linspace(0, 1, 201), [0.88, 0.9, 0.999, 0.9999]])


def test_bins_and_prior_are_the_policys() -> None:
    """A prior fitted over other bins or another spread means something else in the policy."""
    assert bins_of(GRID).tolist() == policy.bins_of(GRID.tolist())
    np.testing.assert_allclose(chance(GRID, PUBLISHED), policy.priors(GRID.tolist()), rtol=1e-5)


def outcomes(count: int, intercept: float, slope: float) -> Outcomes:
    rng, out = np.random.default_rng(0), Outcomes()
    for said in rng.uniform(0.05, 0.999, count):
        survives = rng.random() < chance(np.array([said]), (intercept, slope))[0]
        out.add(np.array([said]), int(survives))
    return out


def test_a_refit_finds_what_made_the_outcomes() -> None:
    """The fit runs over the stretched confidence, not over the confidence."""
    intercept, slope = refit(outcomes(20_000, 0.4, 1.1))
    assert intercept == pytest.approx(0.4, abs=0.1)
    assert slope == pytest.approx(1.1, abs=0.1)


def test_few_outcomes_stay_near_the_published_prior() -> None:
    """Two drafts in a smoke run must not switch drafting off."""
    fitted = refit(outcomes(2, 5.0, 5.0))
    assert np.abs(np.subtract(fitted, PUBLISHED)).max() < 1.0


def test_only_drafts_that_were_reached_count() -> None:
    """What stands behind a miss was never judged."""
    seen = Outcomes()
    seen.add(np.array([0.9, 0.5, 0.1]), 1)
    assert seen.survived == [True, False]
    assert sum(row["drafts"] for row in table(seen, PUBLISHED)) == 2
