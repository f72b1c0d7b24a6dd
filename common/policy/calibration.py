"""Turn what the drafter says (confidence) into what happens (probability).

Owns hit counts in twelve bins of confidence, with decay. Does not know rows or costs.
Float32 throughout: 0.9 and 0.88 share a bin only there.

Source: mlx-serve, `dflash_policy.zig`.
"""

from typing import Final

import numpy as np

N_BINS: Final = 12
DECAY: Final = np.float32(0.97)  # weight of the past at each observation of a bin
PRIOR_WEIGHT: Final = np.float32(3)  # observations that the prior counts for
DOUBT_FLOOR: Final = np.float32(1e-3)  # confidences above 0.999 are one and the same


def spread(confidence: float) -> np.float32:
    """Stretch a confidence so that 0, 0.9, 0.99 and 0.999 lie one apart.

    Args:
        confidence: 0..1; values outside are clipped, NaN counts as 0.

    Returns:
        -log10(1 - confidence), in 0..3.
    """
    finite = np.nan_to_num(np.float32(confidence), nan=0.0)
    doubt = np.float32(1) - np.clip(finite, np.float32(0), np.float32(1))
    return np.float32(-np.log10(np.maximum(doubt, DOUBT_FLOOR)))


def bin_of(confidence: float) -> int:
    """Index of the bin, 0..11; four bins to one unit of `spread`."""
    return min(N_BINS - 1, int(np.floor(np.float32(4) * spread(confidence))))


def prior(confidence: float) -> float:
    """Probability of survival before anything was observed.

    Examples:
        >>> round(prior(0.9), 3)
        0.606
    """
    score = np.float32(-1.15) + np.float32(1.58) * spread(confidence)
    return float(np.float32(1) / (np.float32(1) + np.exp(-score)))


class Calibration:
    """Learns, bin by bin, how often a draft of some confidence survives."""

    def __init__(self) -> None:
        self._hits = np.zeros(N_BINS, np.float32)
        self._seen = np.zeros(N_BINS, np.float32)

    def probability(self, confidence: float) -> float:
        """P(draft survives | those before it did), 0..1."""
        index = bin_of(confidence)
        weighted = self._hits[index] + PRIOR_WEIGHT * np.float32(prior(confidence))
        return float(weighted / (self._seen[index] + PRIOR_WEIGHT))

    def observe(self, confidence: float, *, is_accepted: bool) -> None:
        """Record one draft that was reached; drafts after the first rejection were not."""
        index = bin_of(confidence)
        self._hits[index] = DECAY * self._hits[index] + np.float32(is_accepted)
        self._seen[index] = DECAY * self._seen[index] + np.float32(1)
