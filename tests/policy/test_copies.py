"""Copies have a short and a long class."""

import pytest

from common.policy.copies import CopyStats


def test_priors_by_class():
    """A suffix of 16 tokens or more is the sure class."""
    stats = CopyStats()
    assert stats.probability(15) == pytest.approx(0.7)
    assert stats.probability(16) == pytest.approx(0.9)


def test_losses_stay_in_their_class():
    """Failed long copies must not silence short ones."""
    stats = CopyStats()
    for _ in range(12):
        stats.observe(20, 14, 0)
    assert stats.probability(20) < 0.3
    assert stats.probability(8) == pytest.approx(0.7)


def test_taken_copies_raise_the_rate():
    """Copying that works should be used at full width."""
    stats = CopyStats()
    for _ in range(12):
        stats.observe(20, 14, 14)
    assert stats.probability(20) > 0.9
