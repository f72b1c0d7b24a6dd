"""Sessions: the output is the target's own, whatever is drafted, and refusals change nothing."""

import json

import mlx.core as mx
import numpy as np
import pytest
from support.scripted_drafts import GREEDY, drafted_decode, plain_decode, prefill
from support.target_cases import arrays_of

from common.errors import (
    BadRequest,
    ConfigError,
    EngineError,
    ModelMismatch,
    NotFinite,
    TooLong,
)
from common.wire.messages import Sampling
from target_svc.load import EngineOptions, load_engine

COUNT = 48
PROMPT = np.random.default_rng(2).integers(8, 490, 45).tolist()
BLOCK = 8  # of the drafter in conftest


@pytest.fixture(scope="module")
def engine(folders, drafter):
    """Prompts run in chunks of 20 rows, verifies in the rows asked for."""
    return load_engine(folders["main"], drafter, EngineOptions(prefill_chunk=20))


@pytest.fixture(scope="module")
def fixed_engine(folders, drafter):
    """Every verify is padded to the block."""
    options = EngineOptions(prefill_chunk=20, verify_width=BLOCK)
    return load_engine(folders["main"], drafter, options)


@pytest.fixture(scope="module")
def plain(engine):
    """The reference output."""
    return plain_decode(engine, PROMPT, COUNT + BLOCK)


def own_drafts(plain):
    """The target as its own drafter."""
    return lambda _round, ids, count: plain[len(ids) : len(ids) + count]


def wrong_drafts(plain):
    """Never right, not even at the first draft."""
    return lambda _round, ids, count: [(i + 1) % 512 for i in plain[len(ids) : len(ids) + count]]


def wrong_at(plain, position):
    """Right up to one position, which is wrong."""

    def propose(_round, ids, count):
        drafts = plain[len(ids) : len(ids) + count]
        if position < len(drafts):
            drafts[position] = (drafts[position] + 1) % 512
        return drafts

    return propose


def test_a_drafter_that_is_the_target_is_accepted_in_full(engine, plain):
    """Rows that are verified as something other than what decoding would make of them."""
    ids, accepted = drafted_decode(engine, PROMPT, COUNT, own_drafts(plain))
    assert ids == plain[:COUNT]
    assert set(accepted) == {BLOCK - 1}


def test_a_drafter_that_is_always_wrong_changes_nothing(engine, plain):
    """A rejected draft that leaves a trace."""
    ids, accepted = drafted_decode(engine, PROMPT, COUNT, wrong_drafts(plain))
    assert ids == plain[:COUNT]
    assert accepted == {0: COUNT - 1}


@pytest.mark.parametrize("position", range(BLOCK - 1))
def test_a_drafter_wrong_at_one_position_is_accepted_up_to_it(engine, plain, position):
    """An accepted prefix that is one too long or too short."""
    ids, accepted = drafted_decode(engine, PROMPT, COUNT, wrong_at(plain, position))
    assert ids == plain[:COUNT]
    assert set(accepted) == {position}


@pytest.mark.parametrize("rows", [2, 3, 5, 16])
def test_output_does_not_depend_on_rows(engine, plain, rows):
    """A width with a path of its own."""
    mixed = [own_drafts(plain), wrong_drafts(plain), wrong_at(plain, rows // 2)]
    propose = lambda turn, ids, count: mixed[turn % 3](turn, ids, count)  # noqa: E731
    ids, accepted = drafted_decode(engine, PROMPT, COUNT, propose, rows=rows)
    assert ids == plain[:COUNT]
    assert len(accepted) >= 2  # some rejected, some accepted


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.95}])
def test_sampled_output_depends_on_the_seed_alone(engine, fields):
    """Draws that are spent by rounds, so that drafts change the text."""
    sampling = Sampling(temperature=1.0, seed=3, **fields)
    plain = plain_decode(engine, PROMPT, 24 + BLOCK, sampling)
    assert plain[:24] != plain_decode(engine, PROMPT, 24, Sampling(temperature=1.0, seed=4))
    mixed = [own_drafts(plain), wrong_drafts(plain), wrong_at(plain, 3)]
    propose = lambda turn, ids, count: mixed[turn % 3](turn, ids, count)  # noqa: E731
    for rows in (4, 8):
        ids, accepted = drafted_decode(engine, PROMPT, 24, propose, rows=rows, sampling=sampling)
        assert ids == plain[:24]
        assert accepted[0]
        assert accepted[rows - 1]


def test_fixed_width_gives_the_same_output_for_any_drafts(fixed_engine):
    """A padding row that is accepted, or that reaches a row before it."""
    plain = plain_decode(fixed_engine, PROMPT, COUNT + BLOCK)
    states = []
    for propose in (own_drafts(plain), wrong_drafts(plain)):
        session, _ = prefill(fixed_engine, PROMPT)
        ids = [session.anchor_id]
        while len(ids) < COUNT + 1:
            rows = min(BLOCK, COUNT + 2 - len(ids))
            ids.extend(session.verify(propose(0, ids, rows - 1), rows).ids)
        assert ids[: COUNT + 1] == plain[: COUNT + 1]
        states.append((len(ids), arrays_of(session._state)))
    (one_len, one), (two_len, two) = states
    assert one_len == two_len
    for name in ("0.window", "3.keys", "3.values", "ngram.window", "ngram.history"):
        assert np.abs(one[name] - two[name]).max() < 1e-4, name


def test_verdict_counts_rows_without_the_padding(fixed_engine):
    """A ladder or a statistic fed with rows that nobody drafted."""
    session, _ = prefill(fixed_engine, PROMPT)
    verdict = session.verify((1, 2), 3)
    assert verdict.rows_run == 3
    assert verdict.n_accepted <= 2


def test_features_cover_the_context_without_gap_or_overlap(engine, plain):
    """A drafter's context one row off from the target's."""
    session, steps = prefill(engine, PROMPT, taps=True)
    assert [(s.first_pos, s.features.shape) for s in steps] == [
        (0, (20, 32)),
        (20, (20, 32)),
        (40, (5, 32)),
    ]
    rows, ids = [np.array(step.features) for step in steps], [session.anchor_id]
    for turn in range(5):
        propose = wrong_at(plain, turn)
        verdict = session.verify(propose(0, ids, 7), 8)
        assert verdict.first_pos == sum(map(len, rows))
        assert verdict.features.shape == (verdict.n_accepted + 1, 32)
        rows.append(np.array(verdict.features))
        ids.extend(verdict.ids)
    again, _ = prefill(engine, [*PROMPT, *ids[:-1]], taps=True)
    whole = np.concatenate(rows)
    first, stored = again.feature_rows(0)
    assert first + len(stored) == len(whole) == session.base
    assert np.abs(whole[first:] - np.array(stored)).max() < 1e-4


def test_stored_rows_are_those_a_sliding_drafter_can_use(engine):
    """A late drafter that is sent too little, or a store that grows for ever."""
    session, _ = prefill(engine, PROMPT, taps=True)
    first, rows = session.feature_rows(0)
    assert (first, rows.shape) == (45 - 15, (15, 32))  # W - 1 rows before the anchor
    first, rows = session.feature_rows(40)
    assert (first, rows.shape[0]) == (40, 5)
    assert session.feature_rows(45) is None


def test_without_taps_there_are_no_features(engine):
    """Work done for a request that asked for no drafting."""
    session, steps = prefill(engine, PROMPT)
    assert all(step.features is None for step in steps)
    assert session.verify((), 1).features is None
    assert session.feature_rows(0) is None


def test_draft_outside_the_vocabulary_is_refused_before_anything_changes(engine, plain):
    """A hostile drafter that reaches the embedding table."""
    session, _ = prefill(engine, PROMPT)
    for bad in (-1, 512):
        with pytest.raises(BadRequest, match=f"draft id {bad} at index 1"):
            session.verify((5, bad), 3)
    assert session.verify((), 1).ids == (plain[1],)


def test_rows_out_of_range_are_refused(engine, fixed_engine):
    """A verify wider than was ever warmed up."""
    for one, most in ((engine, 16), (fixed_engine, BLOCK)):
        session, _ = prefill(one, PROMPT)
        for rows in (0, most + 1):
            with pytest.raises(BadRequest, match=f"rows {rows}; a verify here has 1..{most}"):
                session.verify((1,) * 20, rows)


def test_rounds_need_a_prompt_and_an_open_session(engine):
    """An anchor that does not exist yet, or state that is gone."""
    session = engine.open(GREEDY, taps=False)
    with pytest.raises(EngineError, match="no anchor"):
        session.verify((), 1)
    list(session.prefill(PROMPT))
    with pytest.raises(EngineError, match="has run its prompt"):
        next(session.prefill(PROMPT))
    session.close()
    with pytest.raises(EngineError, match="closed"):
        session.verify((), 1)


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ([], BadRequest, "0 tokens"),
        ([5, 512], BadRequest, "prompt id 512 at index 1"),
        ([8] * 4096, TooLong, "4095"),
    ],
)
def test_impossible_prompts_are_refused(engine, prompt, error, words):
    """A fault inside the network instead of a sentence."""
    with pytest.raises(error, match=words):
        next(engine.open(GREEDY, taps=False).prefill(prompt))


def test_taps_without_a_drafter_are_refused(folders):
    """A parameter taken and ignored."""
    bare = load_engine(folders["main"], None, EngineOptions())
    with pytest.raises(BadRequest, match="no drafter"):
        bare.open(GREEDY, taps=True)


def test_scores_that_are_not_finite_end_the_round_without_a_change(engine, plain, monkeypatch):
    """NaN that is committed, or an argmax taken of it."""
    session, _ = prefill(engine, PROMPT)
    base = session.base
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "logits", lambda hidden: hidden * mx.nan)
        with pytest.raises(NotFinite, match="row 0"):
            session.verify((1, 2), 3)
    assert session.base == base
    assert session.verify((), 1).ids == (plain[1],)


def test_two_sessions_do_not_meet(engine, plain):
    """State shared between sessions through the model."""
    one, _ = prefill(engine, PROMPT)
    two, _ = prefill(engine, PROMPT[:30])
    ids = [one.anchor_id]
    for _ in range(6):
        two.verify((9, 9, 9), 4)
        ids.extend(one.verify(own_drafts(plain)(0, ids, 3), 4).ids)
    assert ids == plain[: len(ids)]


def test_warm_up_measures_every_width(engine, monkeypatch):
    """A width whose first use is a timed round."""
    monkeypatch.setattr("target_svc.warm_up.TURNS", 1)
    ladder = engine.warm_up()
    assert list(ladder) == list(range(1, 17))
    assert all(ms > 0 for ms in ladder.values())


def test_card_names_what_both_sides_compare(engine, drafter):
    """A pairing that is checked against nothing."""
    card = engine.card
    assert (card.vocab_size, card.context_len, card.eos_ids) == (512, 4096, (7,))
    assert (card.block_size, card.wire.window, card.wire.hidden_size) == (BLOCK, 16, 32)
    assert card.wire.tap_layer_ids == (1, 3, 6)
    assert card.wire.tap_contraction == "stream_mean"
    names = ("fc_hash", "norm_hash", "embedding_hash", "head_hash", "tokenizer_hash")
    assert all(len(getattr(card.wire, name)) == 16 for name in names)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target_layer_ids": [1, 3, 8]}, "layers are 0..7"),
        ({"target_layer_ids": [1, 3]}, r"need \[D, 128\]"),
        ({"target_layer_ids": []}, "must list target layers"),
        ({"target_layer_ids": [1, 3, 6], "tap_contraction": "sum"}, "tap_contraction: 'sum'"),
        ({"target_layer_ids": [0, 3, 7], "tap_contraction": "next_attention_read"}, r"\[0, 7\]"),
    ],
)
def test_a_drafter_of_another_target_is_refused(folders, drafter, tmp_path, change, words):
    """Features of the right width and the wrong content."""
    config = json.loads((drafter / "config.json").read_text()) | {"dflash_config": change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((drafter / "model.safetensors").read_bytes())
    with pytest.raises(ModelMismatch, match=words):
        load_engine(folders["main"], tmp_path, EngineOptions())


def test_options_out_of_range_are_refused():
    """A zero that means something else further down."""
    with pytest.raises(ConfigError, match="prefill_chunk: 0"):
        EngineOptions(prefill_chunk=0)
