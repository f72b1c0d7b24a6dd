"""The probe measures what it says, on a random target that loads like a real one."""

import json

import mlx.core as mx
import pytest

from common.errors import ConfigError
from target_svc.load import EngineOptions, load_engine
from target_svc.probe import Probe, table
from target_svc.random_checkpoint import Sizes, write_checkpoint

SIZES = Sizes(
    layers=4,
    hidden=64,
    experts=4,
    value_heads=12,
    expert_width=16,
    head_dim=32,
    vocab=128,
    ngram_rows=200,
    context=512,
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """A random target of four layers."""
    folder = tmp_path_factory.mktemp("random")
    assert write_checkpoint(folder, SIZES) > 100_000
    return load_engine(folder, None, EngineOptions(prefill_chunk=64))


def test_everything_is_measured_and_kept_on_the_way(engine, tmp_path):
    """Minutes of measuring that are lost when the next measurement fails."""
    out = tmp_path / "probe.json"
    probe = Probe(engine, out, budget_s=60, repeats=1)
    probe.run([96, 130], [1, 8], 3)
    figures = json.loads(out.read_text())
    assert set(figures) == {"experts_ms"} | {
        f"{key}.{context}{more}"
        for context in (96, 130)
        for key, more in (
            ("prefill", ""),
            ("prefill", ".overlapped"),
            ("ladder", ""),
            ("peak_mib", ""),
            ("modes", ".1"),
            ("modes", ".8"),
            ("direct", ""),
        )
    }
    modes = figures["modes.96.8"]
    assert len(modes) == 8
    assert all(0 < one["first_ms"] <= one["build_ms"] <= one["ms"] for one in modes.values())
    assert all(("prebuilt" in name) == (one["prepare_ms"] > 0.1) for name, one in modes.items())
    assert list(figures["ladder.130"]) == ["1", "8"]
    assert len(list(table(probe.figures))) > len(figures)


def test_nothing_is_begun_when_time_is_up(engine, tmp_path):
    """A machine that is taken away in the middle."""
    probe = Probe(engine, tmp_path / "probe.json", budget_s=-1, repeats=1)
    probe.run([96], [1], 3)
    assert not any(key.startswith("ladder") for key in probe.figures)


def test_heads_that_cannot_be_shared_out_are_refused():
    """A shape error from inside the network."""
    with pytest.raises(ConfigError, match="value_heads: 8; a multiple of 12"):
        Sizes(value_heads=8)


def test_weights_depend_on_the_seed_alone(tmp_path):
    """Two probes that compare two networks."""
    logits = []
    for name, seed in (("one", 3), ("two", 3), ("three", 4)):
        (tmp_path / name).mkdir()
        write_checkpoint(tmp_path / name, SIZES, seed)
        tensors = mx.load(str(tmp_path / name / "model-0.safetensors"))
        logits.append(mx.sum(mx.abs(tensors["lm_head.weight"])).item())
    assert logits[0] == logits[1] != logits[2]
