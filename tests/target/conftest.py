"""Tiny targets, made once per run; BLAS on one thread, as the tests' limits were set with it."""

import json
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from common.checkpoint.blas import load_openblas

load_openblas()

from pathlib import Path  # noqa: E402

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from support.tiny import GOLDEN_CASES, make_tiny_target, write_safetensors  # noqa: E402

from target_svc.models.qwen4_exp import load  # noqa: E402

mx.set_default_device(mx.cpu)


@pytest.fixture(scope="session")
def golden():
    """What transformers computed; see tests/golden/make_qwen4.py."""
    with np.load(Path(__file__).parents[1] / "golden" / "qwen4.npz") as stored:
        return dict(stored)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """The golden cases' checkpoint folders by name."""
    place = tmp_path_factory.mktemp("targets")
    return {name: make_tiny_target(place / name, **fields) for name, fields in GOLDEN_CASES.items()}


@pytest.fixture(scope="session")
def models(folders):
    """The golden cases' networks by name."""
    return {name: load(folder) for name, folder in folders.items()}


@pytest.fixture(scope="session")
def model(models):
    """The main case's network: eight layers, budget of 16 tokens, end-of-text id 7."""
    return models["main"]


@pytest.fixture(scope="session")
def drafter(tmp_path_factory):
    """The two tensors and the config that the target reads of a drafter."""
    folder = tmp_path_factory.mktemp("drafter")
    rng = np.random.default_rng(4)
    tensors = {
        "fc.weight": rng.standard_normal((32, 192), dtype=np.float32) / 14,
        "hidden_norm.weight": 1 + 0.2 * rng.standard_normal(32, dtype=np.float32),
    }
    write_safetensors(folder / "model.safetensors", tensors, dtype="F32")
    config = {
        "block_size": 8,
        "rms_norm_eps": 1e-6,
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 16,
        "dflash_config": {"target_layer_ids": [1, 3, 6]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
