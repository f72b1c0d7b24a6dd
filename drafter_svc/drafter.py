"""Draft blocks for sessions: open, append features, draft, close.

Owns the calls that the drafter process makes. Does not know messages, sockets, requests or policy.
Invariant: a draft changes nothing; what a session holds is its context, and that only grows by
features of committed positions. Not thread-safe: one compute thread calls it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from common.errors import DFlashError, EngineError, NotFinite
from common.wire.fields import MAX_ITEMS
from common.wire.messages import ModelCard
from drafter_svc import host
from drafter_svc.context import Context
from drafter_svc.draws import Drawing
from drafter_svc.load import Loaded, load
from drafter_svc.model import DFlashModel
from drafter_svc.selector import CandidateSelector, DraftPath

TOGETHER_ON_CPU: Final = 4
TOGETHER_ON_GPU: Final = 16


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """Drafts for the positions after one anchor."""

    draft_ids: tuple[int, ...]
    confidences: tuple[float, ...]  # one per draft, 0..1
    q_ids: tuple[int, ...]  # of drawn drafts: the candidates of each, K for every one ..
    q_probs: tuple[float, ...]  # .. and the probabilities they were drawn with
    build_ms: float  # what the host does before it waits: on CPU all but the choice
    eval_ms: float  # waiting for the device, reading, choosing


@dataclass(frozen=True, slots=True)
class DraftJob:
    """One session that wants a block; arguments of `Drafter.draft`."""

    context: Context
    anchor_id: int
    n_drafts: int
    drawing: Drawing | None = None


class Drafter:
    """One loaded drafter; serves any number of sessions, one call at a time.

    Attributes:
        most_together: blocks that are worth one forward: on a CPU the products of more rows take
            as much longer, on a device the launches are what takes time.
    """

    def __init__(self, loaded: Loaded) -> None:
        self.card: ModelCard = loaded.card
        self.mask_id: int = loaded.config.mask_id
        self.prior = loaded.config.prior
        self._model: DFlashModel = loaded.model
        self.most_together = TOGETHER_ON_CPU if loaded.model.kernels is host else TOGETHER_ON_GPU
        self._selector: CandidateSelector | None = loaded.model.selector

    @property
    def n_drafts(self) -> int:
        """Most drafts of one block, B - 1."""
        return self.card.block_size - 1

    def open(self, session_id: str, max_context: int) -> Context:
        """Start an empty context that may grow to `max_context` positions."""
        if max_context < 1:
            raise EngineError(
                f"session {session_id!r} opened with max_context {max_context}; "
                "at least 1 is needed"
            )
        return Context(session_id, max_context, self._model.open_stores(max_context))

    def append(self, context: Context, rows: NDArray[Any] | mx.array, first_pos: int) -> int:
        """Add fused features of committed positions; on a device submits without waiting.

        Args:
            context: of `open`.
            rows: float [S, H]; row i belongs to position first_pos + i. A NumPy array is checked
                for NaN and infinity; an MLX array is not, since that would wait for it.
            first_pos: at most `context.end`; rows below `context.end` are ignored.

        Returns:
            How many rows were new.

        Raises:
            ContextGap: rows are missing before `first_pos`; carries `wanted_pos`.
            NotFinite: a row holds NaN or infinity.
            EngineError: wrong shape, or more positions than the session may hold.
                Nothing changed in any of these cases.
        """
        H = self.card.hidden_size
        if rows.ndim != 2 or rows.shape[1] != H or rows.shape[0] < 1 or first_pos < 0:
            raise EngineError(
                f"features of {context.session_id!r} have shape {list(rows.shape)} at position "
                f"{first_pos}; [S, {H}] with S >= 1 at a position >= 0 is needed"
            )
        if isinstance(rows, np.ndarray) and not np.isfinite(rows).all():
            raise NotFinite(
                f"features of {context.session_id!r} at position {first_pos} hold NaN or "
                "infinity; every value must be finite"
            )
        return context.append(rows, first_pos, self._model.project)

    def draft(
        self,
        context: Context,
        anchor_id: int,
        n_drafts: int,
        drawing: Drawing | None = None,
    ) -> DraftBlock:
        """Draft the tokens after an anchor that stands at position `context.end`.

        The whole block is always run, as in training, so the drafts of a short request are the
        first ones of a long request. A device is read once.

        Args:
            context: holds the features of every position below the anchor that the window needs.
            anchor_id: the last committed token, 0..V-1.
            n_drafts: 1..B-1; fewer come where a block cannot name the candidates of so many.
            drawing: how drafts are drawn; None takes the best, as DFlash without a selector always
                does: a draft that has no alternative is drawn from itself.

        Raises:
            EngineError: an argument is out of range.
            NotFinite: the network gave NaN or infinity.
        """
        (block,) = self.draft_all([DraftJob(context, anchor_id, n_drafts, drawing)])
        if isinstance(block, DFlashError):
            raise block
        return block

    def draft_all(self, jobs: Sequence["DraftJob"]) -> "list[DraftBlock | DFlashError]":
        """Draft for several sessions in one forward; what each gets is what it gets alone.

        Ids are the same; confidences may differ by rounding, since products of other row counts
        round differently. A fault of one job is returned in its place and spares the others.
        """
        results: dict[int, DraftBlock | DFlashError] = {}
        for index, job in enumerate(jobs):
            try:
                self._check(job.context, job.anchor_id, job.n_drafts)
            except EngineError as fault:
                results[index] = fault
        sound = [index for index in range(len(jobs)) if index not in results]
        for index, block in zip(sound, self._together([jobs[i] for i in sound]), strict=True):
            results[index] = block
        return [results[index] for index in range(len(jobs))]

    def _together(self, jobs: "list[DraftJob]") -> "list[DraftBlock | DFlashError]":
        if not jobs:
            return []
        started, n_slots = time.perf_counter(), self.n_drafts
        hidden = self._model.hidden_of(
            [job.anchor_id for job in jobs], [job.context for job in jobs]
        )
        logits = self._model.logits(hidden)
        build_ms = (time.perf_counter() - started) * 1e3 / len(jobs)
        blocks: list[DraftBlock | DFlashError] = []
        for place, job in enumerate(jobs):
            mine = slice(place * n_slots, (place + 1) * n_slots)
            try:
                blocks.append(self._chosen(job, hidden[mine], logits[mine], build_ms))
            except NotFinite as fault:
                blocks.append(fault)
        if len(jobs) > 1 and any(isinstance(block, NotFinite) for block in blocks):
            return [self._together([job])[0] for job in jobs]  # one job's NaN may be in all
        return blocks

    def _chosen(self, job: "DraftJob", hidden: Any, logits: Any, build_ms: float) -> DraftBlock:
        built, kernels = time.perf_counter(), self._model.kernels
        if self._selector:
            path = self._selector.path(hidden, logits, job.anchor_id, job.drawing)
        else:
            path = _plain_path(*kernels.finished(*kernels.best_ids(logits)))
        width = len(path.q_ids) // len(path.draft_ids)  # candidates of each draft
        n_drafts = min(job.n_drafts, MAX_ITEMS // width) if width else job.n_drafts
        n_named = width * n_drafts
        return DraftBlock(
            path.draft_ids[:n_drafts],
            path.confidences[:n_drafts],
            path.q_ids[:n_named],
            path.q_probs[:n_named],
            build_ms=build_ms,
            eval_ms=(time.perf_counter() - built) * 1e3,
        )

    def warm_up(self) -> None:
        """Run every shape of an ordinary round once, so that no compile lands in a timed draft."""
        context = self.open("warm-up", max(1, self.card.context_len))
        for S in range(1, min(self.card.block_size, context.max_context) + 1):
            context.reset()
            self.append(context, np.zeros((S, self.card.hidden_size), np.float32), 0)
            self.draft(context, self.mask_id, self.n_drafts)

    def _check(self, context: Context, anchor_id: int, n_drafts: int) -> None:
        if not 0 <= anchor_id < self.card.vocab_size:
            raise EngineError(
                f"anchor of {context.session_id!r} is {anchor_id}; "
                f"an id in 0..{self.card.vocab_size - 1} is needed"
            )
        if not 1 <= n_drafts <= self.n_drafts:
            raise EngineError(
                f"{n_drafts} drafts asked for {context.session_id!r}; "
                f"this drafter gives 1..{self.n_drafts}"
            )


def load_drafter(drafter: Path, target: Path) -> Drafter:
    """Load a drafter folder and what it borrows from its target's folder.

    Raises:
        ConfigError: a folder or file is missing or unreadable.
        ModelMismatch: the checkpoints do not fit each other or their own configs.
    """
    return Drafter(load(drafter, target))


def _plain_path(ids: NDArray[Any], probabilities: NDArray[Any]) -> DraftPath:
    if not np.isfinite(probabilities).all():
        raise NotFinite("draft logits hold NaN or infinity; features and weights must be finite")
    return DraftPath(tuple(ids.tolist()), tuple(probabilities.tolist()))
