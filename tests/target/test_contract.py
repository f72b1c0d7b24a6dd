"""A model that cannot take rejected rows back is found at load, and serves plain."""

import logging

import mlx.core as mx
import pytest
from support.scripted_drafts import GREEDY, plain_decode
from support.tiny import make_tiny_target
from support.tiny_drafter import make_tiny_drafter
from support.tiny_glm5_next import make_tiny_glm5_next
from support.tiny_llama import make_tiny_llama
from support.tiny_qwen3 import make_tiny_qwen3
from support.tiny_qwen3_5 import make_tiny_qwen3_5

from common.errors import BadRequest, ConfigError, RollBackRefused
from common.settings import PolicyConfig, TargetConfig
from target_svc.__main__ import notes_of, options_of
from target_svc.contract import refusal_of
from target_svc.load import FAMILIES, EngineOptions, load_engine
from target_svc.models.residual import DenseMixer
from target_svc.models.states.rows import GrowingRows

MAKERS = {
    "qwen4_exp": make_tiny_target,
    "glm5_next": make_tiny_glm5_next,
    "qwen3": make_tiny_qwen3,
    "llama": make_tiny_llama,
    "qwen3_5": make_tiny_qwen3_5,
}
SENTENCE = "state '0.keys' cannot be rolled back: a ring of 4 rows keeps all or none"


class RingRows(GrowingRows):
    """Rows that a full ring has overwritten cannot be brought back."""

    def check(self, rows, keep):
        super().check(rows, keep)
        if keep not in (0, rows):
            raise RollBackRefused("a ring of 4 rows keeps all or none")


@pytest.fixture
def planted(monkeypatch):
    """A family whose first layer keeps its keys in a ring."""
    real = DenseMixer.new_pieces

    def new_pieces(mixer, dtype):
        pieces = real(mixer, dtype)
        if "0.keys" in pieces:
            pieces["0.keys"] = RingRows(2, 16, dtype)
        return pieces

    monkeypatch.setattr(DenseMixer, "new_pieces", new_pieces)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A tiny llama."""
    return make_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory, target):
    """A drafter for it."""
    return make_tiny_drafter(tmp_path_factory.mktemp("drafter"), target)


@pytest.mark.parametrize("name", MAKERS)
def test_every_family_takes_back_any_number_of_rows(tmp_path, name):
    """A family shipped without a complete contract."""
    assert refusal_of(FAMILIES[name](MAKERS[name](tmp_path)), 16) == ""


def test_a_width_that_the_recurrent_state_cannot_serve_is_named(tmp_path):
    """Found in the first round with a rejected draft, after a prompt was run."""
    model = FAMILIES["qwen3_5"](make_tiny_qwen3_5(tmp_path))
    assert "state 'recurrent' cannot be rolled back: keep 1 of 65 rows" in refusal_of(model, 65)


def test_a_piece_that_declares_nothing_is_named(target, monkeypatch):
    """A new kind of state added to a family without a thought of drafts."""
    monkeypatch.setattr(DenseMixer, "new_pieces", lambda _mixer, _dtype: {"0.keys": object()})
    sentence = "state '0.keys' declares no way to be rolled back"
    assert refusal_of(FAMILIES["llama"](target), 16) == sentence


def test_the_question_runs_nothing(target, monkeypatch):
    """A probe that costs a forward at every start."""
    model, evaluated = FAMILIES["llama"](target), []
    monkeypatch.setattr(mx, "eval", lambda *arrays: evaluated.append(arrays))
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: evaluated.append(arrays))
    refusal_of(model, 16)
    assert not evaluated


def test_with_a_drafter_it_starts_plain_and_says_so(planted, target, drafter, caplog):
    """Drafting that fails round after round, or a target that does not start at all."""
    with caplog.at_level(logging.WARNING):
        engine = load_engine(target, drafter, EngineOptions(prefill_chunk=20))
    assert f"drafting is off: {SENTENCE}" in caplog.text
    assert (engine.card.armed.source, engine.card.armed.copies) == ("none", False)
    assert notes_of(engine)["drafting off"] == SENTENCE
    assert (engine.card.block_size, engine.max_rows) == (0, 1)
    with pytest.raises(BadRequest, match="no drafter"):
        engine.open(GREEDY, taps=True)


def test_it_still_serves_plain_and_the_same(planted, target, drafter, monkeypatch):
    """A refusal that takes the target away from those who never asked for drafts."""
    ids = list(range(8, 53))
    engine = load_engine(target, drafter, EngineOptions(prefill_chunk=20))
    assert list(engine.warm_up()) == [1]
    found = plain_decode(engine, ids, 24)
    monkeypatch.undo()
    whole = load_engine(target, drafter, EngineOptions(prefill_chunk=20))
    assert whole.card.refusal == ""
    assert found == plain_decode(whole, ids, 24)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"source": "drafter"}, "policy.source: 'drafter', but state '0.keys'"),
        ({"copies": "on"}, "policy.copies: 'on', but state '0.keys'"),
        ({"verify_width": 8}, "target.verify_width: 8, but state '0.keys'"),
    ],
)
def test_what_was_asked_for_and_cannot_be_armed_is_an_error(
    planted, target, drafter, options, words
):
    """Asked for by name and off in silence: everything runs, plain."""
    with pytest.raises(ConfigError, match=words):
        load_engine(target, drafter, EngineOptions(**options))


def test_the_fixed_policy_asks_for_the_drafter_by_name(planted, target, drafter):
    """A block kept whole every round is a demand; it must not become plain rounds."""
    options = options_of(TargetConfig(), drafter, PolicyConfig(mode="fixed"))
    with pytest.raises(ConfigError, match=r"'drafter', but state '0\.keys'"):
        load_engine(target, drafter, options)
