"""Tiny targets, made once per run; BLAS on one thread, as the tests' limits were set with it."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from common.checkpoint.blas import load_openblas

load_openblas()

from pathlib import Path  # noqa: E402

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from support.tiny import GOLDEN_CASES, make_tiny_target  # noqa: E402

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
