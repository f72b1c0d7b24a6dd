"""The graph of one forward, from empty leaves to rows on the device.

Owns when leaves are filled and when rows are handed over. Does not know drafts' verdicts, sessions
or messages. Four ways to the same bits: the graph is handed over `whole` or `pipelined` (every few
layers), and its leaves are filled first (`eager`) or as late as can be (`deferred`).

Invariant: whatever submits is made by filling, so nothing that reads a leaf can be submitted while
the leaf is empty. A `Build` that is not wanted is abandoned and leaves its state as it was.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from common.errors import EngineError
from target_svc.models.family import Model
from target_svc.models.state import SequenceState
from target_svc.rollback import abandon
from target_svc.taps import Collects

WHOLE: Final = "whole"
PIPELINED: Final = "pipelined"
EAGER: Final = "eager"
DEFERRED: Final = "deferred"


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """How forwards are built, the same for all rounds of a process."""

    pipeline_layers: int = 0  # layers per hand-over; 0 hands over whole
    is_deferred: bool = False  # leaves are filled just before the first hand-over

    @property
    def name(self) -> str:
        """As `ps` and replies show it."""
        build = f"{PIPELINED}/{self.pipeline_layers}" if self.pipeline_layers else WHOLE
        return f"{build} {DEFERRED if self.is_deferred else EAGER}"


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward that was handed to the device.

    Attributes:
        logits: [R, V].
        features: [R, Hd]; None without taps.
        results: all that was handed over at the end, what the state was left with included.
        first_at: when the device got its first layers, on the performance counter.
    """

    logits: mx.array
    features: mx.array | None
    results: tuple[mx.array, ...]
    first_at: float


class Leaves:
    """Empty host inputs of a forward of `rows` rows on `state`. Nothing here evaluates."""

    def __init__(self, model: Model, state: SequenceState, rows: int) -> None:
        self.inputs = model.blank(rows)
        self._base = state.base
        self._model = model
        self._state = state

    def fill(self, ids: Sequence[int]) -> "FilledLeaves":
        """Write the ids of all rows.

        Raises:
            EngineError: another number of ids, or the state went on since; nothing changed.
        """
        if len(ids) != self.inputs.rows:
            raise EngineError(f"{len(ids)} ids for leaves of {self.inputs.rows} rows; give as many")
        if self._state.base != self._base:
            raise EngineError(
                f"leaves are for position {self._base}, the state is at {self._state.base}; build "
                "again after a commit"
            )
        self._model.fill(self.inputs, ids, self._state)
        return FilledLeaves(self._state)


class FilledLeaves:
    """Leaves with ids in them, made by `Leaves.fill`: the one thing that submits."""

    def __init__(self, state: SequenceState) -> None:
        self._state = state
        self._first_at = 0.0

    def submit(self, *arrays: mx.array) -> None:
        """Hand arrays to the device; buffers that they extend are written in place from now on."""
        if not self._first_at:
            self._first_at = time.perf_counter()
        self._state.let_go()
        mx.async_eval(*arrays)

    def finish(self, logits: mx.array, features: mx.array | None) -> Forward:
        """Hand over the results, and with them all that they leave in the state."""
        extra = () if features is None else (features,)
        results = (logits, *extra, *self._state.arrays())
        self.submit(*results)
        return Forward(logits, features, results, self._first_at)


class Build:
    """A whole graph on empty leaves. It can be filled or abandoned, and nothing else.

    Args:
        model: the target.
        state: between forwards; it captures the rows until the build is abandoned or committed.
        rows: R.
        taps: None where nobody drafts.
        plan: where the hand-over may be cut.
    """

    def __init__(
        self, model: Model, state: SequenceState, rows: int, taps: Collects | None, plan: BuildPlan
    ) -> None:
        self.rows = rows
        self._state = state
        self._leaves = Leaves(model, state, rows)
        self._stages: list[mx.array] = []
        self._layers = plan.pipeline_layers
        tap = None if taps is None else taps.collector()
        hidden = model.forward(self._leaves.inputs, state, tap=tap, submit=self._note_stage)
        self._logits = model.logits(hidden)
        self._features = None if tap is None else tap.features()

    def fill(self, ids: Sequence[int]) -> "Filled":
        """Write the ids of all rows into the leaves.

        Raises:
            EngineError: see `Leaves.fill`.
        """
        return Filled(self._leaves.fill(ids), self._stages, self._logits, self._features)

    def abandon(self) -> None:
        """Release what the graph claimed of the state."""
        abandon(self._state)

    def _note_stage(self, index: int, residual: mx.array) -> None:
        if self._layers and (index + 1) % self._layers == 0:
            self._stages.append(residual)


class Filled:
    """A graph whose leaves hold ids; made by `Build.fill`."""

    def __init__(
        self,
        leaves: FilledLeaves,
        stages: Sequence[mx.array],
        logits: mx.array,
        features: mx.array | None,
    ) -> None:
        self._leaves = leaves
        self._stages = stages
        self._logits = logits
        self._features = features

    def submit(self) -> Forward:
        """Hand the graph to the device, stage by stage."""
        for residual in self._stages:
            self._leaves.submit(residual)
        return self._leaves.finish(self._logits, self._features)


class _HandOver:
    """Submits every few layers of a graph that is still being built; fills before the first."""

    def __init__(self, leaves: Leaves, ids: Sequence[int], plan: BuildPlan) -> None:
        self.inputs = leaves.inputs
        self._empty = leaves
        self._ids = ids
        self._layers = plan.pipeline_layers
        self._filled = None if plan.is_deferred else leaves.fill(ids)

    def __call__(self, index: int, residual: mx.array) -> None:
        if self._layers and (index + 1) % self._layers == 0:
            self.filled().submit(residual)

    def filled(self) -> FilledLeaves:
        if self._filled is None:
            self._filled = self._empty.fill(self._ids)
        return self._filled


def build_and_submit(
    model: Model, state: SequenceState, ids: Sequence[int], taps: Collects | None, plan: BuildPlan
) -> Forward:
    """Fill, build and submit rows `ids` in the order of the plan, where no build stands ready.

    Raises:
        EngineError: see `Leaves.fill`.
    """
    hand_over = _HandOver(Leaves(model, state, len(ids)), ids, plan)
    tap = None if taps is None else taps.collector()
    hidden = model.forward(hand_over.inputs, state, tap=tap, submit=hand_over)
    logits = model.logits(hidden)
    features = None if tap is None else tap.features()
    return hand_over.filled().finish(logits, features)
