"""Same seed, same bytes: whatever is drafted, how wide a block is, and whether anybody drafts."""

import itertools

import numpy as np
import pytest

from common.wire.messages import Sampling
from target_svc.load import EngineOptions, load_engine

WIDTH = 8
COUNT = 40
PROMPT = np.random.default_rng(4).integers(8, 490, 41).tolist()
ASKED = {
    "greedy": Sampling(),
    "greedy, penalties": Sampling(repetition_penalty=1.4, presence_penalty=0.5),
    "exact": Sampling(temperature=1.0, seed=11),
    "exact, filters": Sampling(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=5),
    "exact, penalties": Sampling(temperature=0.8, frequency_penalty=0.6, seed=7),
}


@pytest.fixture(scope="module")
def engine(folders, drafter):
    """Every forward has the rows of the widest block, so that kernels round alike."""
    return load_engine(folders["main"], drafter, EngineOptions(verify_width=WIDTH))


def decoded(engine, sampling, drafts_at, *, taps=True):
    """Ids of a whole reply, and (drafts, accepted) of its rounds.

    Args:
        engine: loaded.
        sampling: of the request.
        drafts_at: given the ids so far and the round's index, the drafts.
        taps: whether features are made for a drafter.
    """
    session, rounds = engine.open(sampling, taps=taps), []
    for _ in session.prefill(PROMPT):
        pass
    ids = [session.anchor_id]
    while len(ids) < COUNT:
        drafts = drafts_at(ids, len(rounds))
        verdict = session.verify(drafts, len(drafts) + 1)
        rounds.append((len(drafts), verdict.n_accepted))
        ids += verdict.ids
    session.close()
    return ids[:COUNT], rounds


@pytest.fixture(scope="module", params=ASKED)
def asked(request, engine):
    """A request and its plain reply, made with nobody drafting."""
    sampling = ASKED[request.param]
    return sampling, decoded(engine, sampling, lambda ids, index: (), taps=False)[0]


@pytest.mark.parametrize("block", range(1, WIDTH + 1))
def test_no_width_of_the_block_changes_a_byte(engine, asked, block):
    """Right drafts and wrong ones, at every place of the block."""
    sampling, plain = asked

    def drafts_at(ids, index):
        drafts = plain[len(ids) : len(ids) + block - 1]
        wrong_from = index % (block + 1)
        return [*drafts[:wrong_from], *((token + 1) % 512 for token in drafts[wrong_from:])]

    ids, rounds = decoded(engine, sampling, drafts_at)
    assert ids == plain
    if block > 1:
        assert any(sent == accepted == block - 1 for sent, accepted in rounds)
        assert any(accepted < sent for sent, accepted in rounds)


def test_no_change_of_width_changes_a_byte(engine, asked):
    """What an adaptive policy does: plain rounds, narrow ones, whole blocks, in any order."""
    sampling, plain = asked
    widths = itertools.cycle([0, 7, 1, 3, 0, 0, 5, 2, 7, 6, 4])
    ids, rounds = decoded(
        engine, sampling, lambda ids, index: plain[len(ids) : len(ids) + next(widths)]
    )
    assert ids == plain
    assert {0, 1, 7} <= {sent for sent, _ in rounds}
    assert any(sent == accepted == 7 for sent, accepted in rounds)


def test_a_drafter_that_lies_changes_no_byte(engine, asked):
    """It sees what was committed and sends anything: noise, the last token, other seeds' text."""
    sampling, plain = asked
    rng = np.random.default_rng(3)
    lies = itertools.cycle(
        [
            lambda ids: rng.integers(0, 512, 7).tolist(),
            lambda ids: [ids[-1]] * 7,
            lambda ids: plain[len(ids) + 1 : len(ids) + 8],
            lambda ids: [7, 0, *plain[len(ids) : len(ids) + 5]],
        ]
    )
    ids, rounds = decoded(engine, sampling, lambda ids, index: next(lies)(ids))
    assert ids == plain
    assert sum(sent for sent, _ in rounds) > 2 * sum(accepted for _, accepted in rounds)


def test_a_drafter_that_dies_in_the_middle_changes_no_byte(engine, asked):
    """Drafted, then plain, then drafted again."""
    sampling, plain = asked

    def drafts_at(ids, index):
        return () if 15 < len(ids) < 30 else plain[len(ids) : len(ids) + 7]

    ids, rounds = decoded(engine, sampling, drafts_at)
    assert ids == plain
    assert {sent for sent, _ in rounds} >= {0, 7}


def test_other_seeds_give_other_text(engine):
    """Else everything above would compare constants."""
    texts = {
        tuple(decoded(engine, Sampling(temperature=1.0, seed=seed), lambda ids, index: ())[0])
        for seed in range(4)
    }
    assert len(texts) == 4
