"""The queue: turns, limits, and the estimate of when to come back."""

import pytest

from common.coordinator.admission import Queue
from common.errors import Busy


def queue_of(*entries, max_len=10):
    queue = Queue(max_len)
    for number, client in entries:
        queue.put(number, client, 1)
    return queue


def drained(queue):
    return [queue.take() for _ in range(len(queue))]


def test_clients_take_turns():
    """One client with many requests must not shut out another."""
    queue = queue_of((1, "a"), (2, "a"), (3, "a"), (4, "b"), (5, "b"))
    assert drained(queue) == [1, 4, 2, 5, 3]


def test_one_client_is_served_in_order():
    """First come, first served."""
    assert drained(queue_of((1, "a"), (2, "a"), (3, "a"))) == [1, 2, 3]


def test_replayed_requests_go_first():
    """Whoever has begun must not wait behind whoever has not."""
    queue = queue_of((1, "a"), (2, "b"))
    queue.put_first(9)
    assert drained(queue) == [9, 1, 2]


def test_full_queue_is_busy_and_says_when_to_come_back():
    """The estimate grows with the queue and with how long requests take."""
    queue = queue_of((1, "a"), (2, "a"), max_len=2)
    for _ in range(50):
        queue.finished(20.0)
    with pytest.raises(Busy) as busy:
        queue.put(3, "b", 2)
    assert busy.value.retry_after_s == pytest.approx(20.0, rel=0.01)
    assert len(queue) == 2


@pytest.mark.parametrize("number", [1, 2, 3, 9, 77])
def test_any_request_can_leave(number):
    """A cancelled request must not be placed later; an unknown one changes nothing."""
    queue = queue_of((1, "a"), (2, "a"), (3, "b"))
    queue.put_first(9)
    queue.remove(number)
    assert set(drained(queue)) == {1, 2, 3, 9} - {number}


def test_empty_queue_has_nobody():
    """Taking from nothing is no error."""
    assert queue_of().take() is None
