"""Rotary positions: split-half pairing on the first dimensions of a head.

Owns the frequencies and the table of cosines and sines. Does not know heads' meaning. Text only:
three equal axes of multi-axis rope are plain rope. Angles are float32 products, as the reference
computes them.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

import mlx.core as mx
import numpy as np

from common.errors import ModelMismatch

_STEP = 1024  # positions added to the table at a time
ROPE_TYPES: Final = ("default", "linear", "llama3")


def frequencies(parameters: Mapping[str, Any], rotary: int) -> np.ndarray:
    """Angles per position, float32 [rotary / 2].

    Args:
        parameters: "rope_theta", "rope_type" (one of `ROPE_TYPES`; absent is "default"), and what
            that type needs. "linear" divides all frequencies by "factor"; "llama3" divides those
            of long waves, keeps those of short ones, and goes from one to the other in between.
        rotary: how many dimensions turn, even.

    Raises:
        ModelMismatch: another type.
        KeyError: a field of the type is missing.
    """
    kind = parameters.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise ModelMismatch(f"rope_type {kind!r}; implemented are {list(ROPE_TYPES)}")
    exponents = np.arange(0, rotary, 2, dtype=np.float32) / np.float32(rotary)
    plain = (1.0 / np.float32(parameters["rope_theta"]) ** exponents).astype(np.float32)
    if kind == "default":
        return plain
    divided = plain / np.float32(parameters["factor"])
    return divided if kind == "linear" else _between(plain, divided, parameters)


def _between(plain: np.ndarray, divided: np.ndarray, parameters: Mapping[str, Any]) -> np.ndarray:
    """The frequencies of Llama 3.1: by how many waves fit into the first context."""
    waves = parameters["original_max_position_embeddings"] * plain / np.float32(2 * math.pi)
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    share = np.clip((waves - low) / (high - low), 0.0, 1.0).astype(np.float32)
    return (1 - share) * divided + share * plain


class RopeTable:
    """Cosines and sines by absolute position.

    Args:
        theta: base of the frequencies.
        rotary: how many leading dimensions turn, even.
        width: dimensions of the widest head that uses the table; the rest passes unchanged.
        turning: of `frequencies`, where they are not those of `theta` alone.
    """

    def __init__(
        self,
        theta: float,
        rotary: int,
        width: int,
        dtype: mx.Dtype,
        turning: np.ndarray | None = None,
    ) -> None:
        plain = {"rope_theta": theta}
        self._frequencies = frequencies(plain, rotary) if turning is None else turning
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
