"""StreamState: what a client makes of the messages of one request."""

import json

import pytest

from common.errors import Busy, DeadlineExceeded, PeerLost, PeerSilent, WireError
from common.sdk.stream import ASK_AFTER_S, LOST_AFTER_S, ProgressEvent, StreamState, TokenEvent
from common.wire.messages import Accepted, Done, Failed, PrefillProgress, Reject, Status, Tokens


def state(timeout_s=None):
    return StreamState("r1", now=0.0, timeout_s=timeout_s)


def tokens(index, *ids, n_accepted=0):
    pieces = tuple(f"<{token}>" for token in ids)
    return Tokens(request="r1", index=index, ids=ids, pieces=pieces, n_accepted=n_accepted)


def done(n_tokens, tail="", stats="{}"):
    return Done(request="r1", finish_reason="length", tail=tail, stats=stats, n_tokens=n_tokens)


def test_tokens_become_events_with_contiguous_indices_and_text():
    """Guards the order of the stream, the one thing every reader relies on."""
    stream = state()
    first = stream.on_message(tokens(0, 5), now=1.0)
    second = stream.on_message(tokens(1, 6, 7, n_accepted=1), now=2.0)
    assert first == TokenEvent(0, (5,), ("<5>",), 0, "<5>")
    assert second == TokenEvent(1, (6, 7), ("<6>", "<7>"), 1, "<6><7>")


def test_repeated_tokens_reach_the_caller_once():
    """A replay on another target must not print a word twice."""
    stream = state()
    stream.on_message(tokens(0, 5, 6), now=1.0)
    assert stream.on_message(tokens(0, 5, 6), now=2.0) is None
    assert stream.on_message(tokens(1, 6), now=2.0) is None
    assert stream.token_ids == [5, 6]


def test_a_gap_in_the_indices_is_an_error():
    """A lost Tokens message must not become silently shorter text."""
    stream = state()
    stream.on_message(tokens(0, 5), now=1.0)
    with pytest.raises(WireError, match="expected 1"):
        stream.on_message(tokens(2, 7), now=2.0)


def test_done_carries_text_tail_seed_and_statistics():
    """The rest of an incomplete character comes with Done and belongs to the text."""
    stream = state()
    stream.on_message(Accepted(request="r1", seed=42, queued_behind=0), now=0.5)
    stream.on_message(tokens(0, 5), now=1.0)
    stream.on_message(tokens(1, 6, 7), now=3.0)
    last = stream.on_message(done(3, tail="!", stats=json.dumps({"rounds": 2})), now=3.0)
    assert (last.text, last.finish_reason) == ("!", "length")
    completion = stream.completion
    assert completion.text == "<5><6><7>!"
    assert completion.seed == 42
    assert completion.n_tokens == 3
    assert completion.stats == {"rounds": 2, "tokens_per_s": 1.0, "ttft_s": 1.0}


def test_done_with_another_number_of_tokens_is_an_error():
    """A completion must hold every token that the coordinator counted."""
    stream = state()
    stream.on_message(tokens(0, 5), now=1.0)
    with pytest.raises(WireError, match=r"Done\.n_tokens"):
        stream.on_message(done(2), now=2.0)


def test_statistics_of_the_coordinator_are_kept():
    """The client's own clock fills gaps only."""
    stream = state()
    stream.on_message(tokens(0, 5), now=1.0)
    stream.on_message(done(1, stats='{"tokens_per_s": 7.5, "ttft_s": 0.25}'), now=1.0)
    assert stream.completion.stats == {"tokens_per_s": 7.5, "ttft_s": 0.25}


def test_a_single_token_has_no_rate():
    """One token has no interval: the rate is 0, not a division by zero."""
    stream = state()
    stream.on_message(tokens(0, 5), now=1.0)
    stream.on_message(done(1), now=1.0)
    assert stream.completion.stats["tokens_per_s"] == 0.0


def test_progress_before_the_first_token_is_reported():
    """A long prefill must not look like a hang."""
    stream = state()
    queued = stream.on_message(Accepted(request="r1", seed=1, queued_behind=2), now=0.1)
    prefill = stream.on_message(PrefillProgress(name="r1", done=256, total=900), now=0.2)
    assert queued == ProgressEvent("queued", 0, 2)
    assert prefill == ProgressEvent("prefill", 256, 900)


def test_failure_raises_its_own_type():
    """A caller can tell `busy` from everything else and knows when to come back."""
    failed = Failed(name="r1", code="busy", message="queue: 64 waiting", retry_after_s=2.5)
    with pytest.raises(Busy, match="64 waiting") as caught:
        state().on_message(failed, now=1.0)
    assert caught.value.retry_after_s == 2.5


def test_messages_of_other_requests_are_ignored():
    """A link that carried an earlier request may still deliver its last words."""
    stream = state()
    other = Tokens(request="r0", index=0, ids=(9,), pieces=("x",), n_accepted=0)
    assert stream.on_message(other, now=1.0) is None
    assert stream.token_ids == []


def test_silence_leads_to_one_question_and_then_to_an_error():
    """A dead coordinator must end in a typed error, never in a hang."""
    stream = state()
    assert stream.next_deadline() == ASK_AFTER_S
    assert stream.on_time(ASK_AFTER_S) is True
    assert stream.on_time(ASK_AFTER_S + 1) is False
    assert stream.next_deadline() == LOST_AFTER_S
    with pytest.raises(PeerSilent):
        stream.on_time(LOST_AFTER_S)


def test_an_answer_to_the_question_keeps_a_queued_request_waiting():
    """Waiting behind others is not silence."""
    stream = state()
    stream.on_time(ASK_AFTER_S)
    stream.on_message(Status(request="r1", body="{}"), now=11.0)
    assert stream.on_time(LOST_AFTER_S) is False
    assert stream.next_deadline() == 11.0 + ASK_AFTER_S


def test_a_passed_deadline_raises_even_without_an_answer():
    """`timeout_s` holds when the coordinator is busy or gone."""
    stream = state(timeout_s=1.5)
    assert stream.next_deadline() == 3.5
    with pytest.raises(DeadlineExceeded, match=r"1\.5 s"):
        stream.on_time(3.5)


def test_a_coordinator_that_does_not_know_the_connection_ends_the_request():
    """Any answer counts as a sign of life; a refusal taken for one would be waited on for ever."""
    stream = state()

    with pytest.raises(PeerLost, match="send the request again"):
        stream.on_message(Reject("not_ready", "Submit before Hello; say Hello first"), 1.0)

    assert not stream.is_over  # so that the connection is dropped, not kept for the next request
