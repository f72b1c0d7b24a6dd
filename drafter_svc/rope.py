"""Rotate queries and keys by absolute position.

Owns the drafter's own rotary settings and frequencies, and the layout that makes rotation one
product: dimension i and i + head_dim/2 of every head lie side by side, as the real and imaginary
part of one number. The loader reorders the projections so; dot products do not notice. Does not
know heads or caches, nor the target's settings.

Source: Hugging Face `modeling_rope_utils` (fields, YaRN); z-lab/dflash (split halves).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from drafter_svc.fields import read_number, read_whole, refuse

_KINDS: Final = ("default", "linear", "yarn")
_TABLE: Final = 4096  # first positions, whose rotations are kept; 1 MB at head_dim 64


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary settings; always the drafter's own, never the target's."""

    theta: float
    kind: str = "default"  # "default" | "linear" | "yarn"
    factor: float = 1.0
    original_max_position: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # YaRN's band ends at whole dimensions


def read_rope(fields: Mapping[str, Any]) -> RopeConfig:
    """Read the rotary settings of a drafter's config.

    Args:
        fields: of config.json; the settings stand in `rope_parameters`, in older files in
            `rope_scaling`, and `rope_theta` there or beside them.

    Raises:
        ModelMismatch: a setting is missing, not built, or said twice and differently; names it.
    """
    scaling = _scaling(fields)
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in _KINDS:
        raise refuse("rope_type", kind, "default, linear or yarn")
    known = {**fields, **scaling}
    if known.get("partial_rotary_factor", 1.0) != 1.0:
        right = "1.0; drafters rotate whole heads"
        raise refuse("partial_rotary_factor", known["partial_rotary_factor"], right)
    if known.get("rope_is_neox_style", True) is not True:
        right = "true; drafters rotate split halves"
        raise refuse("rope_is_neox_style", known["rope_is_neox_style"], right)
    length = read_whole(known, "max_position_embeddings", 0)
    config = RopeConfig(
        theta=read_number(known, "rope_theta", 10000.0),
        kind=kind,
        factor=read_number(scaling, "factor", 0.0 if kind != "default" else 1.0),
        original_max_position=read_whole(known, "original_max_position_embeddings", length),
        attention_factor=_number_or_none(known, "attention_factor"),
        beta_fast=read_number(known, "beta_fast", 32.0),
        beta_slow=read_number(known, "beta_slow", 1.0),
        mscale=_number_or_none(known, "mscale"),
        mscale_all_dim=_number_or_none(known, "mscale_all_dim"),
        truncate=bool(known.get("truncate", True)),
    )
    if config.theta <= 1:
        raise refuse("rope_theta", config.theta, "above 1")
    if config.factor <= 0:
        raise refuse("factor", scaling.get("factor"), f"above 0 for rope_type {kind}")
    if kind == "yarn" and config.original_max_position < 1:
        raise refuse("original_max_position_embeddings", config.original_max_position, "above 0")
    return config


def _scaling(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The one set of settings; it must not contradict itself."""
    found = [(name, fields.get(name)) for name in ("rope_parameters", "rope_scaling")]
    said = [(name, value) for name, value in found if value]
    for name, value in said:
        if not isinstance(value, Mapping) or any(isinstance(v, Mapping) for v in value.values()):
            raise refuse(name, value, "one object of settings, the same for all layers")
    if len(said) > 1 and said[0][1] != said[1][1]:
        raise refuse("rope_scaling", said[1][1], "absent beside other rope_parameters")
    scaling: Mapping[str, Any] = said[0][1] or {} if said else {}
    theta, other = scaling.get("rope_theta"), fields.get("rope_theta")
    if None not in (theta, other) and theta != other:
        raise refuse("rope_theta", other, f"{theta!r}, as in {said[0][0]}")
    return scaling


def _number_or_none(fields: Mapping[str, Any], name: str) -> float | None:
    return None if fields.get(name) is None else read_number(fields, name, 0.0)


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

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
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
