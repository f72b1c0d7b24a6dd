"""Drafts of the target's own head: what it is fed, and chains of its proposals.

Owns one sequence's rows at the head, and the way from streams to drafts. Does not know rounds,
messages or acceptance. Plays the part of `Taps`: its "features" are the trunk's last streams, which
stay in this process.

Invariant: the head's state holds committed rows only; a chain's own rows are cut off again.
"""

import copy
import time
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np

from common.errors import EngineError, NotFinite
from target_svc.models.qwen4_mtp import MtpHead
from target_svc.models.state import Own, SequenceState, itself
from target_svc.rollback import commit

CHAIN: Final = 6  # drafts of one chain, at most
_MOST_WAITING: Final = 16  # rows kept for the next chain; a prompt's chunk is run at once


@dataclass(frozen=True, slots=True)
class ChainDraft:
    """A chain of drafts."""

    ids: tuple[int, ...]
    confidences: tuple[float, ...]  # softmax value of each draft, 0..1
    ms: float


class HeadTaps:
    """Hands the streams after the last layer to the head; made like `Taps`, for one model.

    Args:
        head: loaded.
        n_layers: of the trunk.
        width: S * H.
    """

    def __init__(self, head: MtpHead, n_layers: int, width: int) -> None:
        self.head = head
        self.width = width
        self._last = n_layers - 1

    def collector(self) -> "StreamCollector":
        """A tap for one forward."""
        return StreamCollector(self._last)

    def context(self) -> "HeadContext":
        """The head's side of a new sequence."""
        return HeadContext(self.head)


class StreamCollector:
    """Called after every layer of one forward; keeps the last one's streams."""

    def __init__(self, last: int) -> None:
        self._last = last
        self._streams: mx.array | None = None

    def __call__(self, layer: int, streams: mx.array) -> None:
        """Take streams [R, S, H] after `layer`."""
        if layer == self._last:
            self._streams = streams

    def features(self) -> mx.array:
        """Streams [R, S, H] of the forward's rows; lazy.

        Raises:
            EngineError: the forward had no such layer.
        """
        if self._streams is None:
            raise EngineError(f"no layer {self._last} in this forward; the head needs its streams")
        return self._streams


class HeadContext:
    """One sequence at the head."""

    def __init__(self, head: MtpHead) -> None:
        self._head = head
        self._state: SequenceState = head.new_state()
        self._waiting: list[mx.array] = []  # streams of rows not run yet ..
        self._ids: list[int] = []  # .. and the tokens after them
        self._last: mx.array | None = None  # the head's streams of the last row that was run
        self._newest: mx.array | None = None  # [1, S, H], streams of the last row that was given

    def extend(self, streams: mx.array, following: list[int]) -> None:
        """Take committed rows.

        Args:
            streams: [R, S, H], evaluated, of the next R positions.
            following: the R tokens after those positions; the last one is the anchor, or the first
                token of the next chunk.

        Raises:
            EngineError: another number of tokens; nothing changed.
        """
        if streams.shape[0] != len(following):
            raise EngineError(
                f"{len(following)} tokens after {streams.shape[0]} rows; give as many"
            )
        self._waiting.append(streams)
        self._newest = streams[-1:]
        self._ids.extend(following)
        if len(self._ids) >= _MOST_WAITING:
            self._run_waiting()
            mx.eval(self._last, *self._state.arrays())

    def twin(self, own: Own) -> "HeadContext":
        """Another context of the same rows; neither changes the other.

        Args:
            own: gives the array that the twin holds for one of this context.
        """
        twin = copy.copy(self)
        twin._state = self._state.twin(own)
        twin._waiting, twin._ids = [own(rows) for rows in self._waiting], list(self._ids)
        twin._newest = None if self._newest is None else own(self._newest)
        twin._last = None if self._last is None else own(self._last)
        return twin

    def open_ended(self) -> "HeadContext":
        """A twin that has not been told the token after its last row; `go_on` tells it.

        The token that this context was told may not be the one that follows there.
        """
        twin = self.twin(itself)
        if twin._newest is not None:
            twin._run_waiting()
            twin._cut(twin._state.base - 1)
        twin._last = None
        return twin

    def go_on(self, following: int) -> None:
        """Tell an open-ended context the token after its last row; before anything else."""
        if self._newest is not None:
            self.extend(self._newest, [following])

    def draft(self, n_drafts: int) -> ChainDraft:
        """Propose the tokens after the last one of `extend`, each from the one before.

        Args:
            n_drafts: 1..CHAIN.

        Raises:
            EngineError: no row was ever given, or another number of drafts.
            NotFinite: a score is NaN or infinite.
        """
        if not 1 <= n_drafts <= CHAIN:
            raise EngineError(f"{n_drafts} drafts of a chain; it has 1..{CHAIN}")
        started = time.perf_counter()
        self._run_waiting()
        if self._last is None:
            raise EngineError("the head was given no rows; prefill first")
        ids, confidences = self._chain(self._last, n_drafts)
        chosen, shares = np.array(ids), np.array(confidences)  # the one wait
        if not np.isfinite(shares).all():
            raise NotFinite("draft scores hold NaN or infinity; weights must be finite")
        ms = (time.perf_counter() - started) * 1e3
        return ChainDraft(tuple(chosen.tolist()), tuple(shares.tolist()), ms)

    def _chain(self, streams: mx.array, n_drafts: int) -> tuple[mx.array, mx.array]:
        end = self._state.base
        ids: list[mx.array] = []
        shares: list[mx.array] = []
        for link in range(n_drafts):
            scores = self._head.logits(streams).astype(mx.float32)
            ids.append(mx.argmax(scores, axis=-1).astype(mx.int32))
            shares.append(mx.exp(mx.max(scores, axis=-1) - mx.logsumexp(scores, axis=-1)))
            if link + 1 < n_drafts:
                streams = self._head.forward(ids[-1], streams, self._state)
                commit(self._state, 1)
        self._cut(end)
        return mx.concatenate(ids), mx.concatenate(shares)

    def _run_waiting(self) -> None:
        if not self._ids:
            return
        streams = self._waiting[0] if len(self._waiting) == 1 else mx.concatenate(self._waiting)
        out = self._head.forward(mx.array(self._ids, dtype=mx.int32), streams, self._state)
        commit(self._state, len(self._ids))
        self._last = out[-1:]
        self._waiting, self._ids = [], []

    def _cut(self, length: int) -> None:
        pieces: dict[str, Any] = self._state.pieces
        for piece in pieces.values():
            piece.cut(length)
        self._state.base = length
