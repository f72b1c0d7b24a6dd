"""Rounds on packed products: greedy output with drafts equals the target's own, in every family."""

import numpy as np
import pytest
from support.packing import make_pack
from support.scripted_drafts import drafted_decode, plain_decode, prefill
from support.tiny import make_tiny_target
from support.tiny_glm5_next import make_tiny_glm5_next
from support.tiny_llama import make_tiny_llama
from support.tiny_qwen3 import make_tiny_qwen3
from support.tiny_qwen3_5 import make_tiny_qwen3_5

from common.sources import MTP, NONE
from target_svc.__main__ import notes_of
from target_svc.load import EngineOptions, load_engine
from target_svc.models.blocks.linear import holds_packed
from target_svc.mtp import CHAIN

MAKERS = {
    "qwen4_exp": (make_tiny_target, {"dtype": "F32", "num_hidden_layers": 4, "hc_lowrank": 32}),
    "glm5_next": (make_tiny_glm5_next, {}),
    "qwen3": (make_tiny_qwen3, {}),
    "qwen3_moe": (make_tiny_qwen3, {"case": "qwen3_moe"}),
    "llama": (make_tiny_llama, {}),
    "qwen3_5": (make_tiny_qwen3_5, {}),
    "qwen3_5_moe": (make_tiny_qwen3_5, {"case": "qwen3_5_moe"}),
}
PROMPT = np.random.default_rng(2).integers(8, 300, 45).tolist()
COUNT, BLOCK = 30, 8


def engine_of(pack, *, keep, source=NONE):
    options = EngineOptions(prefill_chunk=20, verify_width=BLOCK, keep_packed=keep, source=source)
    return load_engine(pack, None, options)


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
@pytest.mark.parametrize("family", MAKERS)
def test_drafts_change_nothing(family, mode, tmp_path):
    """A rejected draft in the output, and a pack that was dequantized although it was to stay."""
    make, fields = MAKERS[family]
    pack = make_pack(make(tmp_path / "published", **fields), tmp_path / "pack", mode=mode)
    engine = engine_of(pack, keep=True)
    assert notes_of(engine)["weights"] == "packed"
    longer = plain_decode(engine, PROMPT, COUNT + BLOCK)
    assert longer == plain_decode(engine_of(pack, keep=False), PROMPT, COUNT + BLOCK)

    def propose(round_, ids, count):
        right = [*longer[len(ids) : len(ids) + count]]
        if round_ % 2:
            right[round_ % count] = (right[round_ % count] + 1) % 300
        return right

    ids, accepted = drafted_decode(engine, PROMPT, COUNT, propose, rows=BLOCK)
    assert ids == longer[:COUNT]
    assert accepted[BLOCK - 1] > 0
    assert any(accepted[count] for count in range(BLOCK - 1))


def test_a_packed_head_drafts_as_its_values_do(tmp_path):
    """A head whose matrices are read under another format than the trunk's."""
    source = make_tiny_target(
        tmp_path / "published", dtype="F32", has_head=True, num_hidden_layers=4
    )
    pack, drafts = make_pack(source, tmp_path / "pack"), []
    for keep in (True, False):
        engine = engine_of(pack, keep=keep, source=MTP)
        assert holds_packed(engine.taps.head) == keep
        session, _ = prefill(engine, PROMPT, taps=True)
        drafts.append(session.draft(CHAIN))
    assert drafts[0].ids == drafts[1].ids
    shares = np.array([draft.confidences for draft in drafts])
    assert np.abs(shares[0] - shares[1]).max() < 1e-5
