"""Delivery and Readers by themselves: what goes out, what is cut, what is kept."""

import pytest

from common.coordinator import readers as readers_module
from common.coordinator.delivery import Delivery
from common.coordinator.readers import Readers
from common.wire.messages import Accepted, Done, Failed, PrefillProgress, Sampling, Submit, Tokens
from common.wire.tensors import from_ids

OWNER = ("", "c")


def tokens(index, *ids, n_accepted=0, **shares):
    return Tokens("r", index, ids, tuple(f"<{token}>" for token in ids), n_accepted, **shares)


def done(n):
    return Done("r", "length", "", "{}", n)


def kept(*groups, window=0):
    delivery = Delivery(1, "alice", "r", window, OWNER)
    for group in groups:
        delivery.take(group)
    return delivery


def test_group_that_is_cut_keeps_its_logprobs_and_drafts_in_step():
    """Log probabilities that slip by one token are worse than none."""
    shares = {
        "logprobs": (-1.0, -2.0, -3.0),
        "top_ids": (1, 2, 3, 4, 5, 6),
        "top_logprobs": (-0.1, -0.2, -0.3, -0.4, -0.5, -0.6),
    }
    delivery = kept(tokens(0, 7, 8, 9, n_accepted=2, **shares))
    delivery.leave()
    delivery.attach("bob", "q", 0, 1)
    (part,) = delivery.resend()
    assert (part.request, part.index, part.ids, part.pieces) == ("q", 1, (8, 9), ("<8>", "<9>"))
    assert part.n_accepted == 1
    assert part.logprobs == (-2.0, -3.0)
    assert part.top_ids == (3, 4, 5, 6)
    assert part.top_logprobs == (-0.3, -0.4, -0.5, -0.6)


@pytest.mark.parametrize("index", range(7))
def test_any_index_gets_the_rest_once(index):
    """Whole groups, cut groups, and nothing but the end."""
    delivery = kept(tokens(0, 1), tokens(1, 2, 3, 4), tokens(4, 5, 6), done(6))
    delivery.attach("bob", "r", 0, index)
    *rest, end = delivery.resend()
    assert [token for group in rest for token in group.ids] == [1, 2, 3, 4, 5, 6][index:]
    at = index
    for group in rest:
        assert group.index == at
        at += len(group.ids)
    assert end == done(6)
    assert delivery.resend() == []


def test_nothing_goes_out_while_nobody_reads_and_all_of_it_later():
    """The tokens of an absence are kept, its progress is not."""
    delivery = kept(tokens(0, 1))
    delivery.leave()
    assert delivery.take(PrefillProgress("r", 1, 2)) == []
    assert delivery.take(tokens(1, 2)) == []
    assert delivery.take(done(2)) == []
    delivery.attach("bob", "r", 0, 0)
    assert delivery.resend() == [tokens(0, 1), tokens(1, 2), done(2)]


def test_window_counts_what_is_sent_and_not_read():
    """The end waits for its tokens; a Read of the future counts as all that was sent."""
    delivery = kept(tokens(0, 1, 2, 3), tokens(3, 4, 5, 6), tokens(6, 7), done(7))
    delivery.attach("bob", "r", 4, 0)
    assert delivery.resend() == [tokens(0, 1, 2, 3), tokens(3, 4, 5, 6)]
    assert delivery.is_behind
    assert delivery.read(1) == []
    assert delivery.read(10_000) == [tokens(6, 7), done(7)]
    assert not delivery.is_behind
    assert delivery.is_whole


def test_cancelled_reply_ends_without_the_tokens_that_wait():
    """Who wants no more gets no more; another failure comes after its tokens."""
    for code, n_messages in (("cancelled", 1), ("deadline_exceeded", 0)):
        delivery = kept(tokens(0, 1, 2), tokens(2, 3), window=2)
        delivery.attach("bob", "r", 2, 0)
        assert delivery.resend() == [tokens(0, 1, 2)]
        assert len(delivery.take(Failed("r", code, "x"))) == n_messages


# --------------------------------------------------------------------------- readers


def submit(claim, **changes):
    return Submit("r", from_ids([1]), Sampling(), claim=claim, **changes)


class Stage:
    def __init__(self, keep_s=10.0):
        self.posted = []
        self.readers = Readers(keep_s, lambda peer, message: self.posted.append((peer, message)))

    def run(self, number, claim, n, now=0.0):
        """A request that made n tokens and ended."""
        delivery = self.readers.new(number, f"peer-{number}", "", submit(claim))
        self.readers.enter(delivery)
        for index in range(n):
            self.readers.take(delivery, tokens(index, 5))
        self.readers.take(delivery, done(n))
        self.readers.end(delivery, now)
        return delivery

    def knows(self, claim):
        return self.readers.claimed("", submit(claim)) is not None


def test_kept_replies_are_bounded_in_size(monkeypatch):
    """A few long replies with many numbers weigh more than many short ones."""
    monkeypatch.setattr(readers_module, "MAX_ENDED_VALUES", 100)
    stage = Stage()
    for number in range(5):
        stage.run(number, f"c{number}", 20)
    assert [stage.knows(f"c{number}") for number in range(5)] == [False] * 3 + [True] * 2


def test_kept_replies_are_bounded_in_time_from_their_end():
    """Each for as long, whatever the order in which they are asked for."""
    stage = Stage(keep_s=10.0)
    first = stage.run(1, "c1", 3, now=0.0)
    stage.run(2, "c2", 3, now=4.0)
    assert stage.readers.next_deadline() == 10.0
    stage.readers.resume(first, "bob", submit("c1"), 0, 5.0)  # that is a new beginning
    assert stage.readers.next_deadline() == 14.0
    stage.readers.on_time(14.0)
    assert (stage.knows("c1"), stage.knows("c2")) == (True, False)
    stage.readers.on_time(15.0)
    assert not stage.knows("c1")
    assert stage.readers.next_deadline() is None


def test_without_a_time_to_keep_nothing_is_kept():
    """`coordinator.resume_s = 0` turns it off, and a claim is none."""
    stage = Stage(keep_s=0.0)
    stage.run(1, "c1", 3)
    assert not stage.knows("c1")
    assert len(stage.readers) == 0


def test_resume_answers_with_accepted_first():
    """A client must know its seed and that it was understood before anything else."""
    stage = Stage()
    delivery = stage.run(1, "c1", 3)
    stage.posted.clear()
    stage.readers.resume(delivery, "bob", submit("c1", from_index=2), 0, 1.0)
    assert stage.posted == [("bob", Accepted("r", 0, 0)), ("bob", tokens(2, 5)), ("bob", done(3))]
