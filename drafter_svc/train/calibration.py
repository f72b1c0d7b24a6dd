"""How often a draft of some confidence is accepted, and the prior that says so beforehand.

Owns the report's bins and the refitted prior. Knows confidences and outcomes only.
Bins and the published prior are those of the round policy, restated here because this side may not
know the policy; a test holds the two together.

Source: mlx-serve, `dflash_policy.zig` (bins, published prior).
"""

from dataclasses import dataclass, field

import numpy as np

N_BINS = 12
PUBLISHED = (-1.15, 1.58)  # intercept and slope over `spread`, through a logistic


def spread(confidences: np.ndarray) -> np.ndarray:
    """-log10(1 - confidence), 0..3; float32 [n] from 0..1 [n]."""
    said = np.asarray(confidences, np.float32)
    doubt = np.where(said > 0, np.float32(1) - said, np.float32(1))
    return -np.log10(np.maximum(doubt, np.float32(1e-3)))


def bins_of(confidences: np.ndarray) -> np.ndarray:
    """Index of each confidence's bin, 0..11; four bins to one unit of `spread`."""
    return np.minimum(np.float32(4) * spread(confidences), N_BINS - 1).astype(np.int64)


def chance(confidences: np.ndarray, prior: tuple[float, float]) -> np.ndarray:
    """What a prior (intercept, slope) says of confidences [n]: probabilities [n]."""
    scores = np.float32(prior[0]) + np.float32(prior[1]) * spread(confidences)
    return 1 / (1 + np.exp(-scores))


@dataclass(slots=True)
class Outcomes:
    """Drafts that were reached: what was said of them, and whether they survived."""

    said: list[float] = field(default_factory=list)
    survived: list[bool] = field(default_factory=list)

    def add(self, confidences: np.ndarray, taken: int) -> None:
        """One round's confidences [K - 1], of whose drafts the first `taken` survived."""
        for index, said in enumerate(confidences[: taken + 1].tolist()):
            self.said.append(said)
            self.survived.append(index < taken)


def refit(outcomes: Outcomes, pull: float = 3.0) -> tuple[float, float]:
    """Intercept and slope that fit the outcomes best; few outcomes stay near the published ones.

    Logistic regression over `spread` by Newton's method, with a Gaussian of precision `pull`
    around the published values.
    """
    x = spread(np.array(outcomes.said, np.float32)).astype(np.float64)
    y = np.array(outcomes.survived, np.float64)
    rows, at = np.stack([np.ones_like(x), x], 1), np.array(PUBLISHED)
    for _ in range(25):
        p = 1 / (1 + np.exp(-rows @ at))
        slope = rows.T @ (y - p) - pull * (at - PUBLISHED)
        curve = (rows * (p * (1 - p))[:, None]).T @ rows + pull * np.eye(2)
        at = at + np.linalg.solve(curve, slope)
    return round(float(at[0]), 4), round(float(at[1]), 4)


def table(outcomes: Outcomes, fitted: tuple[float, float]) -> list[dict[str, float]]:
    """Bin by bin: drafts reached, mean confidence, share accepted, what both priors say."""
    said, survived = np.array(outcomes.said, np.float32), np.array(outcomes.survived, float)
    bins, out = bins_of(said), []
    for index in np.unique(bins):
        inside = said[bins == index]
        out.append(
            {
                "bin": int(index),
                "drafts": len(inside),
                "confidence": round(float(inside.mean()), 3),
                "accepted": round(float(survived[bins == index].mean()), 3),
                "published": round(float(chance(inside, PUBLISHED).mean()), 3),
                "refitted": round(float(chance(inside, fitted).mean()), 3),
            }
        )
    return out
