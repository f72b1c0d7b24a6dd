"""Copies are found by agreement with the tail, and rated in a short and a long class."""

import doctest

import pytest

from common.policy import copies
from common.policy.copies import Copy, CopyFinder, CopyStats


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


def found(ids):
    finder = CopyFinder()
    finder.extend(ids)
    return finder.find()


def test_longest_agreement_wins_over_a_later_one():
    """More agreement is a surer copy."""
    ids = [*range(1, 11), 90, 91, 7, 8, 9, 10, 95, *range(1, 11)]
    assert found(ids) == Copy((90, 91, 7, 8, 9, 10, 95, 1, 2, 3, 4, 5, 6, 7, 8), 10)


def test_latest_of_equal_agreements_wins():
    """What was written last is what is going on."""
    ids = [*range(1, 7), 90, *range(1, 7), 95, *range(1, 7)]
    assert found(ids).ids[0] == 95


@pytest.mark.parametrize("ids", [[], [1, 2], [1, 2, 3, 4, 5, 90, 1, 2, 3, 4, 5], list(range(30))])
def test_too_little_agreement_is_no_copy(ids):
    """Five equal tokens are chance."""
    assert found(ids) is None


def test_tail_does_not_find_itself():
    """A copy of nothing would be an empty verify."""
    finder = CopyFinder()
    finder.extend(range(10))
    finder.extend(range(10, 20))
    assert finder.find() is None


def test_four_misses_silence_copies_for_sixteen_rounds():
    """Text that only looks like a copy must not cost every round."""
    stats = CopyStats()
    for _ in range(4):
        assert not stats.is_silent
        stats.observe(20, 14, 0)
    for _ in range(16):
        assert stats.is_silent
        stats.count_round()
    assert not stats.is_silent


def test_examples_in_the_docstrings_hold():
    """Examples that nobody runs go stale."""
    assert doctest.testmod(copies).attempted > 0
    assert doctest.testmod(copies).failed == 0
