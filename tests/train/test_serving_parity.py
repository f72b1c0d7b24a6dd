"""What is trained is what is served: torch against MLX on the same written files."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch (extra `train`) is not installed")

from support.trainer_cases import DRAFTER, SMALL, random_drafter, random_target  # noqa: E402

from drafter_svc.drafter import load_drafter  # noqa: E402
from drafter_svc.train.evaluate import draft_everywhere  # noqa: E402
from drafter_svc.train.export import (  # noqa: E402
    read_drafter,
    read_target,
    write_drafter,
    write_target,
)
from target_svc.models import qwen4_exp  # noqa: E402
from target_svc.taps import load_taps  # noqa: E402

IDS = torch.randint(2, 128, (1, 90), generator=torch.Generator().manual_seed(5))
IDS[0, 20] = IDS[0, 50] = SMALL.eos_token_id


def serve(folder, drafter=None):
    """Logits of IDS by the serving code, and the features a drafter would be sent."""
    model = qwen4_exp.load(folder)
    taps = None if drafter is None else load_taps(drafter, model)[0]
    state, inputs = model.new_state(), model.blank(IDS.shape[1])
    model.fill(inputs, IDS[0].tolist(), state)
    collector = None if taps is None else taps.collector()
    hidden = model.forward(inputs, state, tap=collector)
    features = None if collector is None else np.array(collector.features())
    return np.array(model.logits(hidden)), features


def test_logits_beyond_the_budget_are_those_of_serving(tmp_path) -> None:
    """90 tokens, of which the indexer keeps 32: another tie rule or rope base shows here only."""
    net = random_target()
    write_target(net, tmp_path)
    ours = read_target(SMALL, tmp_path).eval()
    with torch.no_grad():
        sparse = ours.logits(ours(IDS).hidden)[0].numpy()
        ours.select(sparse=False)
        dense = ours.logits(ours(IDS).hidden)[0].numpy()
    served, _ = serve(tmp_path)
    np.testing.assert_allclose(served, sparse, atol=2e-4, rtol=1e-3)
    assert np.abs(served - dense).max() > 1e-2


@pytest.mark.parametrize("version", [1, 2])
def test_drafts_are_those_of_the_serving_drafter(tmp_path, version: int) -> None:
    """Same files, features by the serving target: the drafter must not be trained for another."""
    dims = replace(DRAFTER, version=version)
    write_target(random_target(), tmp_path / "target")
    write_drafter(random_drafter(dims), SMALL, tmp_path / "drafter")
    (tmp_path / "target" / "tokenizer.json").write_text("{}")
    target = read_target(SMALL, tmp_path / "target").eval()
    drafts, said = draft_everywhere(
        target, read_drafter(dims, SMALL, tmp_path / "drafter").eval(), IDS, 10
    )
    _, features = serve(tmp_path / "target", tmp_path / "drafter")
    serving = load_drafter(tmp_path / "drafter", tmp_path / "target")
    context = serving.open("parity", 200)
    end = 0
    for anchor in (10, 33, 60, 89):
        serving.append(context, features[end:anchor], end)
        end = anchor
        block = serving.draft(context, int(IDS[0, anchor]), 7)
        assert list(block.draft_ids) == drafts[anchor - 10].tolist(), anchor
        np.testing.assert_allclose(block.confidences, said[anchor - 10], atol=1e-3)
