"""Rotate queries and keys by absolute position.

Owns the drafter's own frequencies and the layout that makes rotation one product: dimension i and
i + head_dim/2 of every head lie side by side, as the real and imaginary part of one number. The
loader reorders the projections so; dot products do not notice. Does not know heads or caches.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from drafter_svc.config import RopeConfig

_TABLE: Final = 4096  # first positions, whose rotations are kept; 1 MB at head_dim 64


class Rope:
    """Rotations for positions that are only known at run time."""

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        self._frequencies = _frequencies(config, head_dim)
        self._magnitude = _attention_factor(config)
        self._table = self._make(0, _TABLE)

    def turns(self, first_pos: int, n: int) -> NDArray[np.complex64]:
        """Rotations of positions first_pos .. first_pos + n - 1, complex64 [n, 1, head_dim / 2]."""
        end = first_pos + n
        return self._table[first_pos:end] if end <= _TABLE else self._make(first_pos, n)

    def _make(self, first_pos: int, n: int) -> NDArray[np.complex64]:
        positions = np.arange(first_pos, first_pos + n, dtype=np.float32)
        angles = positions[:, None, None] * self._frequencies
        turns = np.empty(angles.shape, np.complex64)
        np.multiply(np.cos(angles), self._magnitude, out=turns.real)
        np.multiply(np.sin(angles), self._magnitude, out=turns.imag)
        return turns


def pair_order(head_dim: int) -> NDArray[np.int64]:
    """Order that puts dimension i and i + head_dim/2 side by side: 0, h, 1, h+1, .. (h = half)."""
    return np.arange(head_dim).reshape(2, head_dim // 2).T.reshape(-1)


def _frequencies(config: RopeConfig, head_dim: int) -> NDArray[np.float32]:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    plain = (1.0 / np.float64(config.theta) ** exponents).astype(np.float64)
    if config.kind == "linear":
        plain = plain / config.factor
    if config.kind == "yarn":
        plain = _yarn(config, head_dim, plain)
    return plain.astype(np.float32)


def _yarn(config: RopeConfig, head_dim: int, plain: NDArray[np.float64]) -> NDArray[np.float64]:
    """Blend of plain and interpolated frequencies. Source: YaRN, arXiv 2309.00071, section 3.2."""

    def dimension(turns: float) -> float:
        length = config.original_max_position
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low = max(math.floor(dimension(config.beta_fast)), 0)
    high = min(math.ceil(dimension(config.beta_slow)), head_dim - 1)
    ramp = (np.arange(head_dim // 2) - low) / max(high - low, 0.001)
    kept = 1.0 - np.clip(ramp, 0.0, 1.0)
    return np.asarray(plain / config.factor * (1.0 - kept) + plain * kept)


def _attention_factor(config: RopeConfig) -> np.float32:
    """Length of the rotated vectors relative to the plain ones; 1 unless YaRN says otherwise."""
    if config.kind != "yarn":
        return np.float32(1.0)
    if config.attention_factor is not None:
        return np.float32(config.attention_factor)
    if config.mscale and config.mscale_all_dim:
        return np.float32(
            _mscale(config.factor, config.mscale) / _mscale(config.factor, config.mscale_all_dim)
        )
    return np.float32(_mscale(config.factor, 1.0))


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
