"""What a request changes in the scores, in which order, and what it is told of them."""

import mlx.core as mx
import numpy as np
import pytest

from common.errors import NotFinite
from common.wire.messages import Sampling
from target_svc.accept import NO_DRAFTS, Drafts, decide, logprobs_of
from target_svc.distribution import adjusted, best, kept_of
from target_svc.seen import Seen

SCORES = np.array([2.0, -1.0, 0.5, 0.0, 1.5], np.float32)


def log_softmax(scores):
    """In float64, by definition."""
    wide = scores.astype(np.float64)
    return wide - np.log(np.exp(wide).sum())


def test_bias_comes_before_penalties_and_they_before_the_temperature():
    """An order that differs from the documented one changes seeded output."""
    sampling = Sampling(
        bias_ids=(1,),
        bias_values=(3.0,),
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
    )
    seen = Seen([1, 3], [0, 0])
    wide = adjusted(SCORES, sampling, seen, (4,))
    # id 0: twice in the reply; 1: in the prompt, biased to 2; 3: in the prompt, zero; 4: a draft
    wanted = [2.0 / 2 - 0.5 - 2 * 0.25, 2.0 / 2, 0.5, 0.0, 1.5 / 2 - 0.5 - 0.25]
    assert np.abs(wide - wanted).max() < 1e-12


def test_a_negative_score_is_multiplied_by_the_repetition_penalty():
    """Dividing it would make a repeated token more likely."""
    sampling = Sampling(repetition_penalty=2.0)
    assert adjusted(SCORES, sampling, Seen([1]))[1] == -2.0


def test_a_row_counts_the_drafts_before_it_and_no_others():
    """Penalties that lag behind by a block, or count a draft that was never committed."""
    sampling = Sampling(frequency_penalty=2.0)
    seen = Seen([], [])
    logits = mx.array(np.stack([SCORES, SCORES, SCORES]))
    decision = decide(logits, Drafts((0, 4)), sampling, 5, seen)
    assert decision.ids == (0, 4, 2)
    assert decision.n_accepted == 2
    assert decide(logits, NO_DRAFTS, sampling, 5, seen).ids == (0,)
    seen.add([0])
    assert decide(logits, NO_DRAFTS, sampling, 6, seen).ids == (4,)


def test_drafted_and_plain_agree_under_penalties():
    """The same text whatever is drafted: penalties must not see what was rejected."""
    rng = np.random.default_rng(2)
    table = rng.standard_normal((12, 12)).astype(np.float32)
    sampling = Sampling(
        temperature=0.8, seed=4, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2
    )

    def run(n_drafts):
        seen, text = Seen([3]), [3]
        while len(text) < 60:
            drafts = tuple(int(token) for token in rng.integers(0, 12, n_drafts))
            if n_drafts and rng.random() < 0.7:  # many right ones
                drafts = tuple(wanted[len(text) : len(text) + n_drafts])
            logits = mx.array(table[[text[-1], *drafts]])
            decision = decide(logits, Drafts(drafts), sampling, len(text), seen)
            seen.add(decision.ids)
            text += decision.ids
            accepted.append(decision.n_accepted)
        return text[:60]

    accepted = []
    wanted = []
    wanted = run(0)
    accepted.clear()
    assert run(3) == wanted
    assert 0 in accepted
    assert 3 in accepted


def test_greedy_takes_the_lowest_id_of_equal_scores():
    """One tie rule everywhere."""
    sampling = Sampling(bias_ids=(4,), bias_values=(0.5,))
    choice = best(adjusted(SCORES, sampling, None))
    assert choice.token == 0
    assert choice.is_near_tie


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"min_p": 0.5}, [0, 4]),  # e^-0.5 = 0.61, e^-1.5 = 0.22
        ({"min_p": 1.0}, [0]),
        ({"min_p": 0.2, "top_k": 2}, [0, 4]),
        ({"top_p": 0.9, "min_p": 0.1}, [0, 2, 4]),
        ({"top_p": 0.6, "min_p": 0.1}, [0, 4]),
    ],
)
def test_min_p_keeps_a_share_of_the_best(fields, kept):
    """A filter on scores instead of probabilities."""
    of = kept_of(SCORES.astype(np.float64), Sampling(temperature=1.0, **fields))
    assert of.ids.tolist() == kept
    assert abs(of.probs.sum() - 1.0) < 1e-12


def test_logprobs_are_those_of_the_raw_scores():
    """Log probabilities after temperature or penalties cannot be compared between requests."""
    sampling = Sampling(temperature=0.5, seed=1, logprobs=2, bias_ids=(2,), bias_values=(9.0,))
    decision = decide(mx.array(SCORES[None]), NO_DRAFTS, sampling, 3)
    (told,) = decision.logprobs
    wanted = log_softmax(SCORES)
    assert abs(told.chosen - wanted[decision.ids[0]]) < 1e-6
    assert told.top_ids == (0, 4)
    assert np.abs(np.array(told.top) - wanted[[0, 4]]).max() < 1e-6


def test_logprobs_name_the_lowest_ids_of_equal_scores():
    """A list that changes with the sort."""
    assert logprobs_of(np.zeros(6, np.float32), 5, 3).top_ids == (0, 1, 2)
    assert logprobs_of(np.zeros(6, np.float32), 5, 0).top_ids == ()


def test_a_row_without_a_finite_score_is_refused_by_number():
    """NaN chosen as the best score."""
    bad = mx.array(np.stack([SCORES, np.full(5, np.nan, np.float32)]))
    with pytest.raises(NotFinite, match="row 1"):
        decide(bad, Drafts((0,)), Sampling(min_p=0.0, logprobs=0), 0)
    with pytest.raises(NotFinite, match="row 1"):
        decide(bad, Drafts((0,)), Sampling(), 0)


@pytest.mark.parametrize("is_on_host", [True, False])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(logprobs=0), Sampling(temperature=0.7)])
def test_certainty_is_the_best_share_of_the_last_row_that_decided(
    sampling, is_on_host, monkeypatch
):
    """Of the raw scores, whatever the request makes of them."""
    monkeypatch.setattr("target_svc.accept.is_cpu", lambda: is_on_host)
    scores = np.random.default_rng(4).normal(scale=3.0, size=(4, 50)).astype(np.float32)
    for lost in (0, 1, 2):
        chosen = decide(mx.array(scores), NO_DRAFTS, sampling, 5).ids
        ids = list(chosen)
        while len(ids) <= lost:
            ids.extend(decide(mx.array(scores[len(ids) :]), NO_DRAFTS, sampling, 5 + len(ids)).ids)
        wrong = (ids[lost] + 1) % 50
        decision = decide(mx.array(scores), Drafts((*ids[:lost], wrong)), sampling, 5)
        assert decision.n_accepted == lost
        wanted = np.exp(log_softmax(scores[lost])).max()
        assert decision.certainty == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("is_on_host", [True, False])
def test_a_certain_target_is_never_more_than_certain(is_on_host, monkeypatch):
    """A share above 1 by a rounding would be refused on the wire."""
    monkeypatch.setattr("target_svc.accept.is_cpu", lambda: is_on_host)
    scores = np.full((1, 30_000), -15.9, np.float32)
    scores[0, 7] = 80.0
    assert decide(mx.array(scores), NO_DRAFTS, Sampling(), 5).certainty <= 1.0
