"""Acceptance above temperature 0: laws by enumeration, worked examples, and planted biases.

Chi-square limits are passed by chance once in a million runs; every planted bias exceeds its limit.
`make test-long` repeats the laws over thirty times as many trials.
"""

import mlx.core as mx
import numpy as np
import pytest
from support.toy_rounds import (
    DRAFTER,
    TARGET,
    chi_square,
    chi_square_limit,
    count_sequences,
    exact_law,
)

from common.wire.messages import Sampling
from target_svc import noise, rules
from target_svc.accept import Drafts, decide
from target_svc.distribution import kept_of
from target_svc.noise import uniform
from target_svc.rules import Source, cascade_law, typical_floor

LAW = exact_law()
LIMIT = chi_square_limit(LAW.size)
TRIALS = 3_000
PLANTED = 8_000
LONG = 100_000
RESIDUAL = Sampling(temperature=1.0, seed=3, acceptance="residual")
EXACT = Sampling(temperature=1.0, seed=3, acceptance="exact")


def by_shape(ids, sources, past):
    """Stop at the first slot whose distribution is flat: knows nothing of that slot's own draft."""
    sharp = [source.probs.max() > 0.55 for source in sources]
    return 1 + next((k for k, is_sharp in enumerate(sharp) if not is_sharp), len(sharp))


def by_past(ids, sources, past):
    """Rows from earlier rounds alone."""
    return 1 + (sum(past[-4:]) % 3)


def by_own_token(ids, sources, past):
    """A bias: whether a slot is verified depends on the very draft in it."""
    shares = [source.prob(token) for token, source in zip(ids, sources, strict=True)]
    return 1 + next((k for k, share in enumerate(shares) if share < 0.45), len(shares))


def by_best_slot(ids, sources, past):
    """A bias: rows by the largest share over all slots, later drafts included."""
    shares = [source.prob(token) for token, source in zip(ids, sources, strict=True)]
    return 2 + int(np.argmax(shares))


CASES = {
    "exact, drawn drafts": (EXACT, {}),
    "exact, best drafts": (EXACT, {"is_drawn": False}),
    "exact, rows by the drafts themselves": (EXACT, {"rows_of": by_own_token}),
    "residual, drawn drafts": (RESIDUAL, {}),
    "residual, best drafts": (RESIDUAL, {"is_drawn": False}),
    "residual, rows by shape": (RESIDUAL, {"rows_of": by_shape}),
    "residual, rows by the past": (RESIDUAL, {"rows_of": by_past}),
    "residual, no drafts": (RESIDUAL, {"n_drafts": 0}),
}


@pytest.mark.parametrize("name", CASES)
def test_output_follows_the_targets_law(name):
    """A speed-up that changes what the model says."""
    sampling, options = CASES[name]
    assert chi_square(count_sequences(sampling, TRIALS, **options), LAW) < LIMIT


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_output_follows_the_targets_law_over_many_rounds(name):
    """A bias too small for a short run."""
    sampling, options = CASES[name]
    assert chi_square(count_sequences(sampling, LONG, **options), LAW) < LIMIT


@pytest.mark.parametrize("rows_of", [by_own_token, by_best_slot])
def test_rows_chosen_by_the_drafts_themselves_are_caught(rows_of):
    """The row chooser used with drawn drafts: kept drafts no longer follow q."""
    counts = count_sequences(RESIDUAL, PLANTED, n_drafts=3, rows_of=rows_of)
    assert chi_square(counts, LAW) > 1.2 * LIMIT


class Forgetful(Source):
    """Knows how likely the draft was, and takes it for the only candidate when it is replaced."""

    def over(self, ids):
        return (ids == self.ids[0]).astype(float)


def test_a_one_hot_remainder_for_a_drawn_draft_is_caught():
    """The correction drawn from p without the draft, as if nothing else could have been drawn."""

    def judge(logits, drafts, sampling, position):
        sources = tuple(
            Forgetful(np.array([token]), np.array([source.prob(token)]))
            for token, source in zip(drafts.ids, drafts.sources, strict=True)
        )
        return decide(logits, Drafts(drafts.ids, sources), sampling, position)

    assert chi_square(count_sequences(RESIDUAL, TRIALS, judge=judge), LAW) > 2 * LIMIT


def test_a_coin_that_repeats_the_draws_noise_is_caught(monkeypatch):
    """One stream of numbers for two purposes: what is corrected depends on why it was rejected."""

    def reused(seed, position):
        return float(uniform(seed, position, np.array([0]))[0])

    monkeypatch.setattr(rules, "coin", reused)
    assert chi_square(count_sequences(RESIDUAL, TRIALS), LAW) > 2 * LIMIT


def test_a_uniform_that_rounds_to_one_is_caught(monkeypatch):
    """Few bits and a half in float32: the noise is infinite, and its token always wins."""

    def rounding(seed, position, ids):
        coarse = np.floor(uniform(seed, position, ids) * 8).astype(np.float32) + np.float32(1.0)
        return (coarse / np.float32(8.0)).astype(np.float64)

    monkeypatch.setattr(noise, "uniform", rounding)
    with np.errstate(divide="ignore"):
        assert chi_square(count_sequences(EXACT, TRIALS), LAW) > 2 * LIMIT
    monkeypatch.undo()
    assert uniform(0, 0, np.arange(1 << 22)).max() < 1.0


def test_lossy_rules_change_the_law():
    """A rule that is labelled lossy and is not, or the other way round."""
    for name in rules.LOSSY:
        sampling = Sampling(temperature=1.0, seed=3, acceptance=name)
        assert chi_square(count_sequences(sampling, TRIALS), LAW) > 2 * LIMIT


# --------------------------------------------------------------------------- worked examples


@pytest.mark.parametrize(("draft_prob", "is_kept"), [(0.1, False), (0.100001, True), (0.5, True)])
def test_typical_floor_of_a_fair_coin(draft_prob, is_kept):
    """The published example: two equal halves give ln 2, so the floor is 0.1, not passed by it."""
    floor = typical_floor(np.array([0.5, 0.5]), 0.2, 1.0)
    assert abs(floor - 0.1) < 1e-12
    assert (draft_prob > floor + 1e-12) is is_kept


def test_typical_floor_of_a_sure_row():
    """The published example: no entropy, floor 0.2."""
    assert typical_floor(np.array([1.0, 0.0]), 0.2, 1.0) == 0.2
    assert typical_floor(np.array([1.0, 0.0]), 5.0, 1.0) == 1.0


def test_cascade_mixture_of_the_published_example():
    """p = (.8, .19, .01), q = (.1, .2, .7), alpha .95."""
    law = cascade_law(np.array([0.8, 0.19, 0.01]), np.array([0.1, 0.2, 0.7]), 0.8 * 0.05)
    assert np.abs(law - [0.66, 0.333, 0.007]).max() < 1e-12


@pytest.mark.parametrize("name", ["typical", "cascade"])
def test_a_draft_kept_without_a_coin_draws_none(monkeypatch, name):
    """A coin drawn on a keep would put two requests' streams out of step."""

    def refuse(*place):
        raise AssertionError("a coin was drawn")

    monkeypatch.setattr(rules, "coin", refuse)
    monkeypatch.setattr(rules, "draw", refuse)
    sampling = Sampling(temperature=1.0, acceptance=name)
    kept = kept_of(np.log(TARGET[3]), sampling)
    ruling = rules.RULES[name](kept, 0, Source.certain(0), sampling, 9)
    assert ruling.is_kept
    assert ruling.token == 0


@pytest.mark.parametrize("name", ["typical", "cascade"])
def test_copies_are_judged_exactly_under_lossy_rules(name):
    """Copying the context becomes certain under a lossy rule, and the text loops."""
    logits = mx.array(np.log(TARGET[[0, 1]]).astype(np.float32))
    lossy = Sampling(temperature=1.0, seed=8, acceptance=name)
    strict = Sampling(temperature=1.0, seed=8)
    copies = [decide(logits, Drafts((1,), (), True), lossy, p).ids for p in range(300)]
    wanted = [decide(logits, Drafts((1,)), strict, p).ids for p in range(300)]
    assert copies == wanted
    assert copies != [decide(logits, Drafts((1,)), lossy, p).ids for p in range(300)]


def test_the_toy_drafter_is_wrong_enough_to_matter():
    """A drafter equal to the target would hide every bias."""
    assert np.abs(TARGET - DRAFTER).max() > 0.3
