"""When a dead process is started again."""

from common.launcher.restart import LONGEST_WAIT_S, STABLE_AFTER_S, RestartRecord


def test_waits_double_up_to_the_longest():
    """A crash loop must not take the machine's cores."""
    record = RestartRecord(backoff_s=0.5, limit=None)
    waits = [record.on_death(lived_s=0.1, chance=0.0) for _ in range(9)]
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert max(waits) == LONGEST_WAIT_S


def test_a_long_life_clears_the_record():
    """A death a day is not a crash loop."""
    record = RestartRecord(backoff_s=0.5, limit=1)
    assert record.on_death(0.1, 0.0) == 0.5
    assert record.on_death(STABLE_AFTER_S, 0.0) == 0.5


def test_limited_restarts_end_in_giving_up():
    """Three tries for a target: then the run must say so."""
    record = RestartRecord(backoff_s=0.5, limit=3)
    waits = [record.on_death(0.1, 0.0) for _ in range(4)]
    assert waits == [0.5, 1.0, 2.0, None]


def test_chance_spreads_the_wait():
    """Replicas that died together must not load together."""
    record = RestartRecord(backoff_s=1.0, limit=None)
    assert record.on_death(0.1, 1.0) == 1.25
