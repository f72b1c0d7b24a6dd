"""Rotary positions: split-half pairing on the first dimensions of a head.

Owns the table of cosines and sines. Does not know heads' meaning. Text only: three equal axes of
multi-axis rope are plain rope. Angles are float32 products, as the reference computes them.
"""

import mlx.core as mx
import numpy as np

_STEP = 1024  # positions added to the table at a time


class RopeTable:
    """Cosines and sines by absolute position.

    Args:
        theta: base of the frequencies.
        rotary: how many leading dimensions turn, even.
        width: dimensions of the widest head that uses the table; the rest passes unchanged.
    """

    def __init__(self, theta: float, rotary: int, width: int, dtype: mx.Dtype) -> None:
        exponents = np.arange(0, rotary, 2, dtype=np.float32) / np.float32(rotary)
        self._frequencies = (1.0 / np.float32(theta) ** exponents).astype(np.float32)
        self._rotary = rotary
        self._width = width
        self._dtype = dtype
        self._length = 0
        self._turns: dict[int, mx.array] = {}
        self._cos = self._sin = mx.zeros((0, 1, width))

    def rows(self, start: int, stop: int, step: int = 1) -> tuple[mx.array, mx.array]:
        """Cosines and sines [n, 1, width] of positions start, start + step, .. below stop."""
        if stop > self._length:
            self._grow(stop)
        return self._cos[start:stop:step], self._sin[start:stop:step]

    def turn(self, x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
        """Rotate x [n, heads, D]; `cos` and `sin` come from `rows` for the same n positions."""
        width = x.shape[-1]
        if width < self._width:
            cos, sin = cos[..., :width], sin[..., :width]
        return x * cos + (x @ self._quarter_turn(width)) * sin

    def _quarter_turn(self, width: int) -> mx.array:
        """The signed permutation [D, D] that maps (first, second) halves to (-second, first)."""
        if width not in self._turns:
            half = self._rotary // 2
            turn = np.zeros((width, width), np.float32)
            index = np.arange(half)
            turn[index + half, index] = -1.0
            turn[index, index + half] = 1.0
            self._turns[width] = mx.array(turn).astype(self._dtype)
        return self._turns[width]

    def _grow(self, length: int) -> None:
        self._length = -(-length // _STEP) * _STEP
        positions = np.arange(self._length, dtype=np.float32)[:, None]
        angles = (positions * self._frequencies).astype(np.float64)
        cos = np.ones((self._length, 1, self._width), np.float32)
        sin = np.zeros((self._length, 1, self._width), np.float32)
        cos[:, 0, : self._rotary] = np.tile(np.cos(angles), 2)
        sin[:, 0, : self._rotary] = np.tile(np.sin(angles), 2)
        self._cos = mx.array(cos).astype(self._dtype)
        self._sin = mx.array(sin).astype(self._dtype)
