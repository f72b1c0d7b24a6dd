"""Compute on another device for a while, whatever this process chose before."""

from contextlib import contextmanager

import mlx.core as mx

from target_svc.models.blocks.delta_kernel import delta_kernels
from target_svc.models.blocks.linear import multiplies
from target_svc.models.blocks.norms import is_cpu
from target_svc.models.blocks.sinkhorn_kernel import weigh_kernel

#: What is asked once in a process, because a process has one device.
ASKED_ONCE = (is_cpu, delta_kernels, weigh_kernel, multiplies)


def has_gpu():
    """Whether MLX can compute on a GPU here."""
    return mx.metal.is_available() or mx.cuda.is_available()


@contextmanager
def on_device(device):
    """Within, `device` is the default, and what depends on it is asked anew; so it is after."""
    before = mx.default_device()
    mx.set_default_device(device)
    _ask_anew()
    try:
        yield
    finally:
        mx.set_default_device(before)
        _ask_anew()


def _ask_anew():
    for asked in ASKED_ONCE:
        asked.cache_clear()
