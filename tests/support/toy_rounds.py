"""A target and a drafter over four tokens, small enough to enumerate.

The target's next token depends on the last one; the drafter's does too, names three of the four,
and is wrong about them. Rounds run through the product's own `decide`; only tables, the drafter's
dice and the number of verified rows are made here.
"""

import itertools
import math

import mlx.core as mx
import numpy as np

from target_svc.accept import Drafts, decide
from target_svc.rules import Source

V = 4
TARGET = np.array(
    [[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.4, 0.1], [0.7, 0.1, 0.1, 0.1]]
)
DRAFTER = np.array(
    [[0.1, 0.45, 0.45, 0.0], [0.0, 0.5, 0.05, 0.45], [0.5, 0.0, 0.05, 0.45], [0.05, 0.3, 0.0, 0.65]]
)
N_TOKENS = 3  # of each trial, after the start token
START = 0


def exact_law(target=TARGET):
    """Probability of every sequence of N_TOKENS after START, by enumeration."""
    law = np.zeros((V,) * N_TOKENS)
    for tokens in itertools.product(range(V), repeat=N_TOKENS):
        path = (START, *tokens)
        law[tokens] = math.prod(target[a, b] for a, b in itertools.pairwise(path))
    return law


def chi_square_limit(cells, z=4.75):
    """What chi-square over so many cells exceeds once in a million runs (Wilson and Hilferty)."""
    k = cells - 1
    return k * (1 - 2 / (9 * k) + z * math.sqrt(2 / (9 * k))) ** 3


def chi_square(counts, law):
    """Pearson's statistic of counted sequences against their law."""
    expected = law * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def draft_chain(last, dice, n_drafts):
    """Drafts drawn one after the other, and what each was drawn from."""
    ids, sources = [], []
    for _ in range(n_drafts):
        row = DRAFTER[last]
        named = np.flatnonzero(row)
        last = int(dice.choice(named, p=row[named]))
        ids.append(last)
        sources.append(Source(named, row[named]))
    return ids, sources


def count_sequences(
    sampling, trials, *, n_drafts=2, rows_of=None, is_drawn=True, tell_sources=True, judge=decide
):
    """Run trials of N_TOKENS tokens each; counts by sequence.

    Args:
        sampling: of every trial; the positions differ, so the noise does.
        trials: how many.
        n_drafts: drafts of a round.
        rows_of: (drafts, sources, past) -> rows to verify, `past` being a list of earlier accepted
            counts; None verifies all.
        is_drawn: drafts are drawn; False takes the drafter's best.
        tell_sources: the acceptance is told what the drafts were drawn from.
        judge: stands in for `decide`, for faults planted in it.
    """
    dice = np.random.default_rng(5)
    counts = np.zeros((V,) * N_TOKENS)
    past = []
    for trial in range(trials):
        tokens = [START]
        while len(tokens) <= N_TOKENS:
            ids, sources = draft_chain(tokens[-1], dice, n_drafts)
            if not is_drawn:
                ids, sources = _best_chain(tokens[-1], n_drafts), []
            rows = n_drafts + 1 if rows_of is None else rows_of(ids, sources, past)
            drafts = Drafts(tuple(ids[: rows - 1]), tuple(sources[: rows - 1]) * tell_sources)
            lasts = [tokens[-1], *drafts.ids]
            logits = mx.array(np.log(TARGET[lasts]).astype(np.float32))
            position = 1000 * trial + len(tokens)
            decision = judge(logits, drafts, sampling, position)
            past.append(decision.n_accepted)
            tokens += decision.ids
        counts[tuple(tokens[1 : N_TOKENS + 1])] += 1
    return counts


def _best_chain(last, n_drafts):
    ids = []
    for _ in range(n_drafts):
        last = int(DRAFTER[last].argmax())
        ids.append(last)
    return ids
