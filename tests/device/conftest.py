"""Device tests, in true float32: `python -m pytest -m device tests/device`.

Each module runs on the GPU whatever another one chose in this process, and leaves that choice.
"""

import os

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # read by MLX at its first product on a GPU

import mlx.core as mx
import pytest
from support.devices import has_gpu, on_device


@pytest.fixture(scope="module", autouse=True)
def gpu():
    """The GPU is the default device while a module of this folder runs."""
    if not has_gpu():
        pytest.skip("needs Metal or CUDA")
    with on_device(mx.gpu):
        yield
