"""What the target remembers about one session between messages."""

import pytest

from common.wire.messages import RoundKey, Sampling, Verify
from target_svc.seat import Seat

KEY = RoundKey("s", 1, 0, 5, 7, 3)


class FakeText:
    def push(self, token):
        return f"<{token}>"

    def finish(self):
        return "!"

    def twin(self):
        return self


def seat(max_tokens=4, n_generated=0, ignore_eos=False, stop=()):
    place = Seat(
        name="s",
        epoch=1,
        ticket="t",
        sampling=Sampling(max_tokens=max_tokens, ignore_eos=ignore_eos, stop=stop),
        session=None,
        reads=None,
        steps=iter(()),
        text=FakeText(),
        stop_ids=frozenset({0}),
    )
    place.replay([7] * n_generated)
    return place


def test_a_repeated_verify_does_not_start_the_wait_for_its_block_again():
    """Asked again every second, a round whose block was lost would wait for ever."""
    place = seat()
    order = Verify(KEY, 4, 500.0)

    place.wait_for_block(order, now=10.0)
    place.wait_for_block(order, now=10.4)

    assert place.waiting.until == pytest.approx(10.5)
    assert place.waited_ms(10.5) == pytest.approx(500.0)


def test_text_ends_before_a_stop_token_inside_a_block():
    """The end-of-text token is not part of the text, and nothing after it is."""
    emission = seat().emit([5, 6, 0, 9])

    assert emission.ids == (5, 6)
    assert emission.pieces == ("<5>", "<6>")
    assert (emission.finish, emission.tail) == ("stop", "!")


def test_text_ends_at_max_tokens_inside_a_block():
    """A block may hold more tokens than the request wants."""
    emission = seat(max_tokens=3, n_generated=1).emit([5, 6, 7, 8])

    assert emission.ids == (5, 6)
    assert emission.finish == "length"


def test_stop_token_is_text_when_it_is_to_be_ignored():
    """`ignore_eos` goes on to max_tokens."""
    emission = seat(ignore_eos=True).emit([5, 0, 6])

    assert emission.ids == (5, 0, 6)
    assert (emission.finish, emission.tail) == ("", "")


def test_what_ends_the_text_is_found_before_it_enters_the_state():
    """A look ahead changes nothing: the same ids are emitted as if nobody had looked."""
    place = seat(max_tokens=9, stop=("6><7",))
    assert place.ends((5, 6, 7, 8)) == (5, 6, 7)
    assert place.ends((5, 6, 7, 8)) == (5, 6, 7)
    assert place.ends((5, 6)) == (5, 6)
    emission = place.emit([5, 6])
    assert (emission.pieces, emission.finish) == (("<5>", "<"), "")
    assert place.ends((7, 8)) == (7,)
    assert place.emit([7]).finish == "stop"
    assert seat().ends is None
