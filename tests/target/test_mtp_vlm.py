"""The draft head against mlx-vlm's own: scores of rows and chains on random checkpoints.

Unlike `test_mtp.py`, whose reference is this project's trainer, nothing here shares a line with it.
"""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.tiny import MTP_CASES, make_tiny_target

from target_svc.models.blocks import sparse_attention
from target_svc.models.family import run_rows
from target_svc.models.qwen4_exp import load
from target_svc.models.qwen4_mtp import load_head
from target_svc.mtp import CHAIN, HeadContext, HeadTaps
from target_svc.rollback import commit

GOLDEN = Path(__file__).parents[1] / "golden" / "mtp_vlm.npz"
ANCHORS = (1, 5, 22, 47, 64)
LIMIT = 1e-5  # float32, of logits up to 2


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as stored:
        return dict(stored)


@pytest.fixture(scope="module", params=MTP_CASES)
def case(request, golden, tmp_path_factory):
    """The head, its trunk's streams, and what mlx-vlm made of both, by name."""
    fields = MTP_CASES[request.param]
    folder = make_tiny_target(
        tmp_path_factory.mktemp(request.param), dtype="F32", has_head=True, **fields
    )
    model = load(folder)
    own = {name.split(":", 1)[1]: v for name, v in golden.items() if name.startswith(request.param)}
    tap = HeadTaps(None, model.facts.n_layers, 0).collector()
    hidden = run_rows(model, own["ids"].tolist(), model.new_state(), tap=tap)
    mx.eval(hidden, tap.features())
    return load_head(folder, model), tap.features(), own


@pytest.mark.parametrize("parts", [(69,), (1,) * 69, (16, 16, 16, 16, 5)])
def test_scores_of_rows_are_those_of_mlx_vlm_however_they_are_fed(case, parts):
    """Norms over one stream instead of over all, inputs concatenated, or 1 + w added twice."""
    head, streams, own = case
    state, rows, start = head.new_state(), [], 0
    for part in parts:
        end = start + part
        following = mx.array(own["ids"][start + 1 : end + 1])
        rows.append(np.array(head.logits(head.forward(following, streams[start:end], state))))
        commit(state, part)
        start = end
    assert np.abs(np.concatenate(rows) - own["logits"]).max() < LIMIT


@pytest.mark.parametrize("anchor", ANCHORS)
def test_chains_are_those_of_mlx_vlm(case, anchor, monkeypatch):
    """A chain that goes on from mixed streams, or whose rows stand at the wrong positions."""
    head, streams, own = case
    seen, real = [], head.logits

    def noted(of):
        seen.append(real(of))
        return seen[-1]

    monkeypatch.setattr(head, "logits", noted)
    context, ids = HeadContext(head), own["ids"].tolist()
    context.extend(streams[:anchor], ids[1 : anchor + 1])
    drafted = context.draft(CHAIN)
    assert list(drafted.ids) == own[f"drafts:{anchor}"].tolist()
    assert np.abs(np.concatenate(seen) - own[f"chain:{anchor}"]).max() < LIMIT


def test_only_the_sparse_case_drops_blocks(case, monkeypatch):
    """Two cases that are one: a budget that covers everything."""
    head, streams, own = case
    monkeypatch.setattr(sparse_attention, "keep_best", lambda scores, count: scores == scores)
    out = head.forward(mx.array(own["ids"][1:]), streams[:-1], head.new_state())
    worst = np.abs(np.array(head.logits(out)) - own["logits"]).max()
    assert (worst > 1e-2) == (head._layer.mixer._shape.kept_blocks < 69 // 4)
