"""The stats line counts only positions that were reached."""

from common.policy.stats import PositionStats


def recorded(*rounds):
    stats = PositionStats()
    for n_drafts, n_accepted in rounds:
        stats.record(n_drafts, n_accepted)
    return stats


def test_formats_of_three_rounds():
    """Positions behind a rejection were never reached and must not count as lost."""
    stats = recorded((7, 7), (7, 2), (0, 0))
    assert stats.format_acceptance() == "1.00/1.00/0.50/1.00/1.00/1.00/1.00"
    assert stats.format_rows() == "1:1,8:2"


def test_widest_block_has_sixteen_rows():
    """Fifteen drafts and the anchor are the end of the table."""
    assert recorded((15, 15)).format_rows() == "16:1"


def test_acceptance_ends_at_the_deepest_position_reached():
    """Positions nobody reached have no rate to show."""
    assert recorded((3, 0)).format_acceptance() == "0.00"
    assert recorded((3, 0), (5, 5)).format_acceptance() == "0.50/1.00/1.00/1.00/1.00"


def test_nothing_recorded_formats_to_nothing():
    """A request without a draft has an empty line, not a division by zero."""
    assert recorded((0, 0)).format_acceptance() == ""
    assert recorded().rows_histogram() == {}
