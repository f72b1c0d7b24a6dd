"""Turn what the drafter says (confidence) into what happens (probability).

Owns hit counts in twelve bins of confidence, with decay. Does not know rows or costs.
Float32 throughout: 0.9 and 0.88 share a bin only there.

Source: mlx-serve, `dflash_policy.zig`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

N_BINS: Final = 12
DECAY: Final = np.float32(0.97)  # weight of the past at each observation of a bin
PRIOR_WEIGHT: Final = np.float32(3)  # observations that the prior counts for
DOUBT_FLOOR: Final = np.float32(1e-3)  # confidences above 0.999 are one and the same
ONE: Final = np.float32(1)


@dataclass(frozen=True, slots=True)
class Prior:
    """What a confidence is worth before anything was observed: a logistic of its `spread`.

    The default is the published one; a drafter's config may bring one fitted to it.
    """

    intercept: float = -1.15
    slope: float = 1.58

    @classmethod
    def from_notes(cls, notes: Mapping[str, object]) -> "Prior":
        """The prior a drafter tells when it is ready; the published one where it tells none."""
        told = notes.get("prior_intercept"), notes.get("prior_slope")
        if not all(isinstance(value, int | float) and math.isfinite(value) for value in told):
            return cls()
        return cls(*map(float, told))  # type: ignore[arg-type]  # both are numbers

    def of(self, stretched: Floats) -> Floats:
        """Probabilities of survival of confidences stretched by `spread`."""
        scores = np.float32(self.intercept) + np.float32(self.slope) * stretched
        return np.asarray(ONE / (ONE + np.exp(-scores)), np.float32)


PUBLISHED: Final = Prior()


def spread(confidences: Sequence[float]) -> Floats:
    """Stretch confidences so that 0, 0.9, 0.99 and 0.999 lie one apart.

    Args:
        confidences: 0..1 each; values outside are clipped, NaN counts as 0.

    Returns:
        -log10(1 - confidence), in 0..3.
    """
    said = np.asarray(confidences, np.float32)
    doubt = np.where(said > 0, ONE - said, ONE)  # NaN is not above 0
    return np.asarray(-np.log10(np.maximum(doubt, DOUBT_FLOOR)), np.float32)


def bins_of(confidences: Sequence[float]) -> list[int]:
    """Index of each confidence's bin, 0..11; four bins to one unit of `spread`.

    Examples:
        >>> bins_of([0.5, 0.88, 0.9, 0.99])
        [1, 3, 3, 8]
    """
    return _bins(spread(confidences))


def priors(confidences: Sequence[float]) -> Floats:
    """Probabilities of survival before anything was observed.

    Examples:
        >>> round(float(priors([0.9])[0]), 3)
        0.606
    """
    return PUBLISHED.of(spread(confidences))


class Calibration:
    """Learns, bin by bin, how often a draft of some confidence survives.

    Attributes:
        prior: what is believed before it has learned.
    """

    def __init__(self, prior: Prior = PUBLISHED) -> None:
        self.prior = prior
        self._hits = np.zeros(N_BINS, np.float32)
        self._seen = np.zeros(N_BINS, np.float32)

    def probabilities(self, confidences: Sequence[float]) -> Floats:
        """P(draft survives | those before it did) of each draft, 0..1."""
        stretched = spread(confidences)
        bins = _bins(stretched)
        weighted = self._hits[bins] + PRIOR_WEIGHT * self.prior.of(stretched)
        return np.asarray(weighted / (self._seen[bins] + PRIOR_WEIGHT), np.float32)

    def observe(self, confidences: Sequence[float], n_accepted: int) -> None:
        """Record drafts that were reached, in order; the first `n_accepted` survived.

        Drafts after the first rejection were not reached and must not be given.
        """
        for index, bin_ in enumerate(bins_of(confidences)):
            hit = np.float32(index < n_accepted)
            self._hits[bin_] = DECAY * self._hits[bin_] + hit
            self._seen[bin_] = DECAY * self._seen[bin_] + ONE


def _bins(stretched: Floats) -> list[int]:
    # not negative, so cutting off is rounding down
    bins: list[int] = np.minimum(np.float32(4) * stretched, N_BINS - 1).astype(np.int64).tolist()
    return bins
