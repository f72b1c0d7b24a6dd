"""A whole target on this machine's GPU, in float32, against what transformers computed."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.target_cases import feed, feed_parts
from support.tiny import GOLDEN_CASES, make_tiny_target

from target_svc.models.blocks.norms import is_cpu
from target_svc.models.family import run_rows
from target_svc.models.qwen4_exp import load
from target_svc.rollback import commit

pytestmark = [pytest.mark.device, pytest.mark.timeout(300)]  # kernels are compiled once
LIMIT = 1e-4


@pytest.fixture(scope="module")
def golden():
    return np.load(Path(__file__).parents[1] / "golden" / "qwen4.npz")


@pytest.fixture(scope="module", params=GOLDEN_CASES)
def case(request, gpu, tmp_path_factory):
    """Name and model; the stored bfloat16 values are computed with in float32."""
    assert not is_cpu()
    folder = make_tiny_target(tmp_path_factory.mktemp("t"), **GOLDEN_CASES[request.param])
    path = folder / "model.safetensors"
    tensors = {
        name: value.astype(mx.float32) if value.dtype == mx.bfloat16 else value
        for name, value in mx.load(str(path)).items()
    }
    mx.eval(tensors)
    mx.save_safetensors(str(path), tensors)
    return request.param, load(folder)


@pytest.mark.parametrize("size", [1, 5, 16, 1000])
def test_scores_equal_the_reference(case, golden, size):
    """Kernels, fused attention and norms that a CPU run never reaches."""
    name, model = case
    ids = golden[f"{name}.ids"].tolist()
    parts = [ids[at : at + size] for at in range(0, len(ids), size)]
    assert np.abs(feed_parts(model, parts) - golden[f"{name}.logits"]).max() < LIMIT


@pytest.mark.parametrize("keep", [1, 2, 5, 8, 15, 16])
def test_rejected_rows_leave_no_bit_behind(case, golden, keep):
    """Two wrong tails, one outcome."""
    name, model = case
    ids = golden[f"{name}.ids"].tolist()
    after = []
    for tail in (7, 300):
        state = model.new_state()
        feed(model, state, ids[:37])
        rows = [*ids[37 : 37 + keep], *[tail] * (16 - keep)]
        mx.eval(run_rows(model, rows, state), *state.arrays())
        commit(state, keep)
        after.append(feed(model, state, ids[37 + keep : 45 + keep]))
    assert (after[0] == after[1]).all()
    assert np.abs(after[0] - golden[f"{name}.logits"][37 + keep : 45 + keep]).max() < LIMIT
