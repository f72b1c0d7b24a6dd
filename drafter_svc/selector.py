"""Turn block logits into drafts and confidences.

Owns the candidate lattice of DFlash2 and the walk through it. Does not know how logits are made.
Invariant: on a device the lattice holds every edge before the walk starts, so a draft costs one
read by the host whatever path is taken; on the host only the edges that the walk meets are made.

Source: speculators `models/dflash2`; z-lab/dflash `CandidateSelector`.
"""

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from common.errors import NotFinite
from drafter_svc import host
from drafter_svc.draws import Drawing
from drafter_svc.kernels import Array, Kernels


@dataclass(frozen=True, slots=True)
class DraftPath:
    """The drafts of one block."""

    draft_ids: tuple[int, ...]
    confidences: tuple[float, ...]  # softmax value of each chosen candidate at temperature 1
    q_ids: tuple[int, ...] = ()  # where drafts are drawn: all candidates, slot by slot ..
    q_probs: tuple[float, ...] = ()  # .. and the probabilities they were drawn with


class CandidateSelector:
    """A bigram correction over the top-K candidates of every slot."""

    def __init__(
        self,
        predecessor_codebook: mx.array,
        successor_codebook: mx.array,
        hidden_projection: mx.array,
        top_k: int,
        kernels: Kernels,
    ) -> None:
        """Take the published tensors: codebooks float [V, r], projection float [r, H]."""
        self._predecessors = kernels.kept(predecessor_codebook)
        self._successors = kernels.kept(successor_codebook)
        self._projection = kernels.kept(hidden_projection.T)
        self._top_k = top_k
        self._kernels = kernels

    def path(
        self, hidden: Array, logits: Array, anchor_id: int, drawing: Drawing | None = None
    ) -> DraftPath:
        """Choose the drafts; arguments as for `lattice`. The one read by the host.

        With `drawing` each draft is drawn given the one before; else it is the best.

        Raises:
            NotFinite: a score is NaN or infinite, which no healthy drafter gives.
        """
        if self._kernels is host:
            return self._walk_at_once(hidden, logits, anchor_id, drawing)
        lattice = self.lattice(hidden, logits, anchor_id)
        candidates, scores = self._kernels.finished(*lattice)
        return walk(candidates, scores, drawing)

    def lattice(self, hidden: Array, logits: Array, anchor_id: int) -> tuple[Array, Array]:
        """Score all edges of all slots.

        Args:
            hidden: float [n, H], final norm applied, one row per slot.
            logits: float32 [n, V].
            anchor_id: 0..V-1.

        Returns:
            candidates, integers [n, K], ascending in every slot, and scores float32 [n, K, K]:
            slot, predecessor (a candidate of the slot before; any, for slot 0), candidate.
        """
        kernels, n = self._kernels, logits.shape[0]
        candidates = kernels.top_ids(logits, self._top_k)
        unary = kernels.along(logits, candidates)
        before = kernels.joined([candidates[:1] * 0 + anchor_id, candidates[:-1]], axis=0)
        gate = kernels.product(hidden, self._projection).reshape(n, 1, -1)
        left = self._predecessors[before] * gate
        edges = left @ self._successors[candidates].swapaxes(1, 2)
        return candidates, edges + unary[:, None]  # float32: the logits' dtype is the wider one

    def _walk_at_once(
        self, hidden: Array, logits: Array, anchor_id: int, drawing: Drawing | None
    ) -> DraftPath:
        candidates = self._kernels.top_ids(logits, self._top_k)
        scores = self._kernels.along(logits, candidates)
        gates = self._kernels.product(hidden, self._projection)
        successors = self._successors[candidates]
        chosen, before, shares = list[int](), anchor_id, list[NDArray[np.float64]]()
        for slot, row in enumerate(scores):
            row += successors[slot] @ (self._predecessors[before] * gates[slot])
            chosen.append(_choice(slot, row, drawing, shares))
            before = candidates[slot, chosen[-1]]
        return _path_of(candidates, np.array(chosen), scores, shares)


def walk(
    candidates: NDArray[Any], scores: NDArray[Any], drawing: Drawing | None = None
) -> DraftPath:
    """Follow the best edge from the anchor, or a drawn one, slot by slot.

    Candidates ascend, so of equal scores the lowest id wins.

    Args:
        candidates: int32 [n, K].
        scores: float32 [n, K, K], as `CandidateSelector.lattice` gives them.
        drawing: None takes the best.

    Raises:
        NotFinite: a score on the path is NaN or infinite.
    """
    chosen, choice = np.empty(len(scores), np.int64), 0
    shares = list[NDArray[np.float64]]()
    for slot, table in enumerate(scores):
        choice = _choice(slot, table[choice], drawing, shares)
        chosen[slot] = choice
    rows = scores[np.arange(len(scores)), np.concatenate([[0], chosen[:-1]])]
    return _path_of(candidates, chosen, rows, shares)


def _choice(
    slot: int, row: NDArray[Any], drawing: Drawing | None, shares: list[NDArray[np.float64]]
) -> int:
    """Place of the slot's draft; a drawn one adds its distribution to `shares`."""
    if drawing is None or not np.isfinite(row).all():  # `_path_of` refuses what is not finite
        return int(row.argmax())
    index, probs = drawing.pick(slot, row)
    shares.append(probs)
    return index


def _path_of(
    candidates: NDArray[Any],
    chosen: NDArray[Any],
    scores: NDArray[Any],
    shares: list[NDArray[np.float64]],
) -> DraftPath:
    """Ids and confidences of the chosen places [n] among candidates and scores [n, K]."""
    if not np.isfinite(scores).all():
        raise NotFinite("drafter scores hold NaN or infinity; features and weights must be finite")
    rows, slots = scores.astype(np.float64), np.arange(len(chosen))
    # Mostly the chosen candidate has the row's greatest score: its softmax value is 1 over the sum.
    weights = np.exp(rows - rows.max(axis=1, keepdims=True))
    confidences = weights[slots, chosen] / weights.sum(axis=1)
    ids = candidates[slots, chosen]
    path = DraftPath(tuple(ids.tolist()), tuple(confidences.tolist()))
    if not shares:
        return path
    named, probs = candidates.reshape(-1).tolist(), np.concatenate(shares).tolist()
    return replace(path, q_ids=tuple(named), q_probs=tuple(probs))
