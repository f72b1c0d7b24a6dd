"""Price verify rows and choose how many of them a round is worth.

Owns the cost ladder (milliseconds by rows) and the row chooser. Does not know where the
probabilities come from, nor what drafting itself costs: by the time rows are chosen it is spent.
Invariant: a ladder never decreases, so one row more is never cheaper.

Source: mlx-serve, `dflash_policy.zig` (ladder points, tie margin).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError

MAX_ROWS: Final = 16  # anchor and 15 drafts
PRIOR_PLAIN_MS: Final = 17.7  # one row of the published ladder
TIE_MARGIN: Final = np.float32(0.02)  # a row more must buy at least two per cent

#: (rows, ms) of GLM-5.3-Flash on an M5 Ultra at 1 K context; linear in between.
PUBLISHED_POINTS: Final = (
    (1, 17.7),
    (2, 25.5),
    (3, 29.6),
    (4, 33.6),
    (5, 36.8),
    (6, 42.4),
    (7, 44.8),
    (8, 47.9),
    (9, 51.1),
    (12, 60.5),
    (16, 69.1),
)


@dataclass(frozen=True, slots=True)
class CostLadder:
    """Verify milliseconds by rows.

    Attributes:
        rungs_ms: 16 values, entry r-1 for r rows; finite, positive, never decreasing.
    """

    rungs_ms: tuple[float, ...]

    def __post_init__(self) -> None:
        rungs = np.asarray(self.rungs_ms, np.float32)
        if rungs.shape != (MAX_ROWS,) or not np.all(np.isfinite(rungs)) or rungs[0] <= 0:
            raise ConfigError(
                f"cost ladder: got {self.rungs_ms}; it needs {MAX_ROWS} finite positive times in ms"
            )

    @classmethod
    def prior(cls, plain_ms: float = PRIOR_PLAIN_MS) -> Self:
        """The published shape, scaled so that one row costs `plain_ms`."""
        return cls(_published_rungs()).scaled(plain_ms)

    @classmethod
    def measured(cls, ms_by_rows: Sequence[float]) -> Self:
        """A ladder from times measured on this machine.

        Args:
            ms_by_rows: 1..16 times, entry r-1 for r rows. Noise only adds time, so a rung that is
                dearer than a wider one is lowered to it; rungs above the last keep the published
                shape.

        Raises:
            ConfigError: no time, more than 16, or one that is not finite and positive.
        """
        measured = np.asarray(ms_by_rows, np.float32)
        measured = np.minimum.accumulate(measured[::-1])[::-1]
        n_measured = len(measured)
        if not 1 <= n_measured <= MAX_ROWS or not np.all(np.isfinite(measured) & (measured > 0)):
            raise ConfigError(
                f"measured ladder: got {list(ms_by_rows)}; "
                f"it needs 1..{MAX_ROWS} finite positive times in ms"
            )
        published = np.asarray(_published_rungs(), np.float32)
        tail = published[n_measured:] * (measured[-1] / published[n_measured - 1])
        return cls(tuple(float(rung) for rung in np.concatenate([measured, tail])))

    @property
    def plain_ms(self) -> float:
        """Cost of one row."""
        return self.rungs_ms[0]

    def ms(self, rows: int) -> float:
        """Cost of `rows` rows, 1..16."""
        return self.rungs_ms[rows - 1]

    def scaled(self, plain_ms: float) -> Self:
        """The same shape with one row at `plain_ms`."""
        rungs = np.asarray(self.rungs_ms, np.float32)
        scaled = rungs * (np.float32(plain_ms) / rungs[0])
        scaled[0] = plain_ms  # exactly, so that a ladder can tell its own scale
        return type(self)(tuple(float(rung) for rung in scaled))


@dataclass(frozen=True, slots=True)
class RowChoice:
    """What the chooser settled on: rows 1..16, tokens expected from them, their cost in ms."""

    rows: int
    tokens: float
    ms: float


def choose_rows(
    probabilities: Sequence[float] | NDArray[np.float32],
    ladder: CostLadder,
    *,
    max_rows: int = MAX_ROWS,
) -> RowChoice:
    """Choose the fewest rows whose tokens per millisecond are within 2 % of the best.

    Args:
        probabilities: entry k is P(draft k survives | the drafts before it did). Entries above 1
            count as 1, negative ones and NaN as 0; only the first 15 are read.
        ladder: cost by rows.
        max_rows: never choose more than this; 1..16.

    Examples:
        >>> choose_rows([0.96] * 7, CostLadder.prior()).rows
        8
        >>> choose_rows([0.4], CostLadder.prior()).rows
        1
    """
    cap = max(1, min(max_rows, MAX_ROWS, len(probabilities) + 1))
    survival = np.asarray(probabilities[: cap - 1], np.float32)
    survival = np.where(survival > 0, np.minimum(survival, np.float32(1)), np.float32(0))
    alive = np.cumprod(survival, dtype=np.float32)
    one = np.ones(1, np.float32)
    tokens = np.cumsum(np.concatenate([one, alive]), dtype=np.float32)
    rates = tokens / np.asarray(ladder.rungs_ms[:cap], np.float32)
    enough = rates >= rates.max() * (np.float32(1) - TIE_MARGIN)
    rows = int(np.argmax(enough)) + 1
    return RowChoice(rows, float(tokens[rows - 1]), ladder.ms(rows))


def _published_rungs() -> tuple[float, ...]:
    rows, ms = zip(*PUBLISHED_POINTS, strict=True)
    rungs = np.interp(np.arange(1, MAX_ROWS + 1), rows, ms).astype(np.float32)
    return tuple(float(rung) for rung in rungs)
