"""Choose the device that MLX computes on.

Owns the choice and its name for people. Does not know models. Call before the first array is made.
"""

import mlx.core as mx

from common.errors import ConfigError


def choose_device(wanted: str) -> str:
    """Make `wanted` MLX's default device.

    Args:
        wanted: "auto" (a GPU where there is one), "cpu" or "gpu".

    Returns:
        "cpu", "metal" or "cuda".

    Raises:
        ConfigError: a GPU is asked for and MLX has none here.
    """
    gpu = _gpu()
    if wanted == "gpu" and not gpu:
        raise ConfigError("device: 'gpu', but MLX sees no GPU here; use 'cpu' or 'auto'")
    if wanted == "cpu" or not gpu:
        mx.set_default_device(mx.cpu)
        return "cpu"
    mx.set_default_device(mx.gpu)
    return gpu


def _gpu() -> str:
    if mx.metal.is_available():
        return "metal"
    if mx.cuda.is_available():
        return "cuda"
    return ""
