"""The checkpoint's own draft head: its scores, its chains, and what a chain leaves behind.

The golden file holds a tiny checkpoint, and what the trainer's torch code computes with it; the
sparse selection is at work in trunk and head.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from support.target_cases import arrays_of
from support.tiny import make_tokenizer, write_safetensors

from common.errors import EngineError, ModelMismatch
from common.wire.messages import Sampling
from target_svc.models.family import run_rows
from target_svc.models.qwen4_exp import load
from target_svc.models.qwen4_mtp import has_head, load_head
from target_svc.mtp import CHAIN, HeadContext, HeadTaps
from target_svc.prefix_cache import PrefixCache
from target_svc.rollback import commit
from target_svc.session import Session
from target_svc.verify import VerifyPlan

GOLDEN = Path(__file__).parents[1] / "golden" / "mtp.npz"
ANCHORS = (1, 7, 30, 41, 58)


@pytest.fixture(scope="module")
def golden():
    return np.load(GOLDEN)


@pytest.fixture(scope="module")
def folder(golden, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mtp")
    tensors = {name[7:]: golden[name] for name in golden if name.startswith("tensor:")}
    config = json.loads(str(golden["config"]))
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors, dtype="F32")
    make_tokenizer(config["text_config"]["vocab_size"]).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return load(folder)


@pytest.fixture(scope="module")
def head(folder, model):
    assert has_head(folder)
    return load_head(folder, model)


@pytest.fixture(scope="module")
def trunk(model, golden):
    """Streams [T, S, H] after the last layer, and logits [T, V]."""
    taps, state = HeadTaps(None, model.facts.n_layers, 0), model.new_state()
    tap = taps.collector()
    logits = model.logits(run_rows(model, golden["ids"].tolist(), state, tap=tap))
    mx.eval(logits, tap.features())
    return tap.features(), np.array(logits)


def test_the_trunk_of_the_golden_is_ours(trunk, golden):
    """A head compared on other streams proves nothing."""
    assert np.abs(trunk[1] - golden["trunk_logits"]).max() < 2e-5


@pytest.mark.parametrize("parts", [(59,), (1,) * 59, (7, 20, 32), (16, 16, 16, 11)])
def test_scores_equal_the_reference_however_rows_are_fed(head, trunk, golden, parts):
    """Norms per stream instead of over all of them, or token and streams a place apart."""
    ids, streams, state = golden["ids"], trunk[0], head.new_state()
    rows, start = [], 0
    for part in parts:
        end = start + part
        out = head.forward(mx.array(ids[start + 1 : end + 1]), streams[start:end], state)
        rows.append(np.array(head.logits(out)))
        commit(state, part)
        start = end
    assert np.abs(np.concatenate(rows) - golden["head_logits"]).max() < 2e-5


@pytest.mark.parametrize("anchor", ANCHORS)
def test_chains_equal_the_reference(head, trunk, golden, anchor):
    """A chain continued from the trunk's streams, or from the wrong position."""
    context = HeadContext(head)
    ids = golden["ids"].tolist()
    context.extend(trunk[0][:anchor], ids[1 : anchor + 1])
    drafted = context.draft(CHAIN)
    assert drafted.ids == tuple(golden[f"drafts:{anchor}"].tolist())
    scores = golden[f"chain_logits:{anchor}"]
    shares = np.exp(scores.max(1) - np.log(np.exp(scores).sum(1)))
    assert np.abs(np.array(drafted.confidences) - shares).max() < 1e-5


def test_a_chain_leaves_nothing_behind(head, trunk, golden):
    """Rows of rejected drafts read as context by the next chain."""
    ids = golden["ids"].tolist()
    with_chains, without = HeadContext(head), HeadContext(head)
    for start, end in ((0, 30), (30, 31), (31, 38), (38, 58)):
        for context in (with_chains, without):
            context.extend(trunk[0][start:end], ids[start + 1 : end + 1])
        with_chains.draft(CHAIN)
        with_chains.draft(2)
    last, wanted = with_chains.draft(CHAIN), without.draft(CHAIN)
    assert last.ids == wanted.ids
    assert last.ids == tuple(golden["drafts:58"].tolist())
    states = [arrays_of(context._state) for context in (with_chains, without)]
    assert states[0].keys() == states[1].keys()
    for name, array in states[0].items():
        assert np.abs(np.array(array) - np.array(states[1][name])).max() < 1e-5


def test_misuse_is_refused_by_number(head, trunk):
    """A shift by one between tokens and streams would only show as bad drafts."""
    context = HeadContext(head)
    with pytest.raises(EngineError, match="no rows"):
        context.draft(2)
    with pytest.raises(EngineError, match="3 tokens after 2 rows"):
        context.extend(trunk[0][:2], [1, 2, 3])
    with pytest.raises(EngineError, match="7 drafts"):
        context.draft(CHAIN + 1)


def test_a_head_with_a_tensor_missing_is_refused(model, golden, tmp_path):
    """Half a head would be random advice."""
    tensors = {name[7:]: golden[name] for name in golden if name.startswith("tensor:mtp.")}
    tensors.pop("mtp.fc_hidden.weight")
    write_safetensors(tmp_path / "model.safetensors", tensors, dtype="F32")
    (tmp_path / "config.json").write_text(str(golden["config"]))
    with pytest.raises(ModelMismatch, match=r"1 missing: mtp\.fc_hidden\.weight"):
        load_head(tmp_path, model)


def drafts_after(host, ids, owner, rounds):
    """Drafts and replies of rounds that the head drafts, and how much needed no forward."""
    session = Session(host, Sampling(), host.taps, owner)
    list(session.prefill(ids))
    drafts, reply = [], [session.anchor_id]
    for _ in range(rounds):
        drafts.append(session.draft(CHAIN).ids)
        reply.extend(session.verify(drafts[-1], CHAIN + 1).ids)
    session.close()
    return drafts, reply, session.n_cached


def test_the_head_drafts_the_same_after_a_kept_prefix(model, head, golden):
    """A head without the prompt's rows, or with a row that was told another token."""
    host = SimpleNamespace(
        model=model,
        card=SimpleNamespace(context_len=400, vocab_size=model.facts.vocab_size),
        plan=VerifyPlan(),
        prefill_chunk=16,
        most_rows=CHAIN + 1,
        prefixes=PrefixCache(1 << 24),
        fits=None,
        taps=HeadTaps(head, model.facts.n_layers, model.args.stream_width),
    )
    ids = golden["ids"].tolist()
    _, reply, n_cached = drafts_after(host, ids[:39], "", 4)
    assert n_cached == 0
    for prompt, known in (
        ([*ids[:39], *ids[39:60]], 39),  # not the token that the first session chose there
        ([*ids[:39], *reply, *ids[39:50]], 39 + len(reply) - 1),
        (ids[:39], 32),
    ):
        warm, cold = drafts_after(host, prompt, "", 6), drafts_after(host, prompt, None, 6)
        assert warm[:2] == cold[:2]
        assert (warm[2], cold[2]) == (known, 0)
    assert ids[39] != reply[0]
