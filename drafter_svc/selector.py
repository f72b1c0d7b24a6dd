"""Turn block logits into drafts and confidences.

Owns the candidate lattice of DFlash2 and the walk through it, and the plain argmax of DFlash. Does
not know how logits are made. Invariant: the lattice holds every edge before the walk starts, so a
draft costs one read by the host whatever path is taken.

Source: speculators `models/dflash2`; z-lab/dflash `CandidateSelector`.
"""

from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from common.errors import NotFinite

_STRIP: Final = 64  # ids per strip of the two-stage top-K; 16 strips of 64 hold the 16 best ids


@dataclass(frozen=True, slots=True)
class DraftPath:
    """The drafts of one block."""

    draft_ids: tuple[int, ...]
    confidences: tuple[float, ...]  # softmax value of each chosen candidate at temperature 1


class CandidateSelector:
    """A bigram correction over the top-K candidates of every slot."""

    def __init__(
        self,
        predecessor_codebook: mx.array,
        successor_codebook: mx.array,
        hidden_projection: mx.array,
        top_k: int,
    ) -> None:
        """Take the published tensors: codebooks float [V, r], projection float [r, H]."""
        self._predecessors = predecessor_codebook
        self._successors = successor_codebook
        self._projection = hidden_projection.T
        self._top_k = top_k

    def lattice(
        self, hidden: mx.array, logits: mx.array, anchor_id: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Score all edges of all slots; lazy.

        Args:
            hidden: float [n, H], final norm applied, one row per slot.
            logits: float32 [n, V].
            anchor_id: int32 [1].

        Returns:
            candidates int32 [n, K], ascending in every slot, and scores float32 [n, K, K]: slot,
            predecessor (a candidate of the slot before; any, for slot 0), candidate.
        """
        n, K = logits.shape[0], self._top_k
        candidates = top_ids(logits, K)
        unary = mx.take_along_axis(logits, candidates, axis=-1)
        before = mx.concatenate([mx.broadcast_to(anchor_id, (1, K)), candidates[:-1]])
        gate = (hidden @ self._projection).reshape(n, 1, -1)
        left = self._predecessors[before] * gate
        edges = left @ self._successors[candidates].swapaxes(1, 2)
        return candidates, edges.astype(mx.float32) + unary[:, None]


def top_ids(logits: mx.array, K: int) -> mx.array:
    """The K best ids of each row of [n, V], int32 [n, K], ascending.

    In two stages, because a partition of a whole vocabulary costs more than the head: an id among
    the K best lies in one of the K strips with the best maxima.
    """
    n, V = logits.shape
    if V <= K * _STRIP:
        return mx.sort(mx.argpartition(logits, V - K, axis=-1)[:, V - K :], axis=-1).astype(
            mx.int32
        )
    if V % _STRIP:
        logits = mx.pad(logits, [(0, 0), (0, -V % _STRIP)], constant_values=-mx.inf)
    strips = logits.reshape(n, -1, _STRIP)
    n_strips = strips.shape[1]
    best = mx.argpartition(strips.max(axis=-1), n_strips - K, axis=-1)[:, n_strips - K :]
    values = mx.take_along_axis(strips, best[..., None], axis=1).reshape(n, K * _STRIP)
    inner = mx.argpartition(values, K * _STRIP - K, axis=-1)[:, K * _STRIP - K :]
    ids = mx.take_along_axis(best, inner // _STRIP, axis=-1) * _STRIP + inner % _STRIP
    return mx.sort(ids.astype(mx.int32), axis=-1)


def walk(candidates: NDArray[Any], scores: NDArray[Any]) -> DraftPath:
    """Follow the best edge from the anchor, slot by slot.

    Candidates ascend, so of equal scores the lowest id wins.

    Args:
        candidates: int32 [n, K].
        scores: float32 [n, K, K], as `CandidateSelector.lattice` gives them.

    Raises:
        NotFinite: a score is NaN or infinite, which no healthy drafter gives.
    """
    if not np.isfinite(scores).all():
        raise NotFinite("drafter scores hold NaN or infinity; features and weights must be finite")
    chosen = np.empty(len(scores), np.int64)
    choice = 0
    for slot, table in enumerate(scores):
        choice = int(table[choice].argmax())
        chosen[slot] = choice
    slots = np.arange(len(scores))
    rows = scores[slots, np.concatenate([[0], chosen[:-1]])].astype(np.float64)
    # The chosen candidate has the row's greatest score, so its softmax value is 1 over the sum.
    sums = np.exp(rows - rows.max(axis=1, keepdims=True)).sum(axis=1)
    return DraftPath(tuple(candidates[slots, chosen].tolist()), tuple((1.0 / sums).tolist()))


def best_ids(logits: mx.array) -> tuple[mx.array, mx.array]:
    """DFlash's choice, without a lattice; lazy.

    Returns:
        argmax ids int32 [n] of logits float32 [n, V], and their probabilities float32 [n].
    """
    peaks = logits.max(axis=-1)
    probabilities = mx.exp(peaks - mx.logsumexp(logits, axis=-1))
    return mx.argmax(logits, axis=-1).astype(mx.int32), probabilities
