"""What the engine asks of a model family, whatever its layers are.

Owns the seam between rounds and networks: facts, host-made inputs, a forward, scores, taps. Does
not know any family; each is one file beside this one.
Invariant: a forward reads the host only through `Inputs`, so its graph can be built before they
are filled, and changes no committed state; `commit` in `target_svc.rollback` does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import mlx.core as mx
import numpy as np

from target_svc.models.state import SequenceState

#: How a tap becomes one H-wide row: the mean over the streams (the residual itself where there is
#: one stream), the final mixer's read, or the read of the layer after the tapped one.
CONTRACTIONS: Final = ("stream_mean", "final_mixer", "next_attention_read")

#: Called after every layer with (layer index, residual rows [R, .., H]).
Tap = Callable[[int, mx.array], None]
#: Called after every layer with (layer index, residual rows); may hand them to the device.
Submit = Callable[[int, mx.array], None]


@dataclass(frozen=True, slots=True)
class Facts:
    """What the engine needs to know of a loaded model."""

    vocab_size: int  # valid ids are 0..vocab_size-1
    hidden: int  # width H of one tap
    n_layers: int
    context_len: int  # most tokens of prompt and reply
    eos_ids: tuple[int, ...]
    embedding_name: str  # published names, for fingerprints
    head_name: str
    contractions: tuple[str, ...]  # of `CONTRACTIONS`, those this family makes
    unreadable_taps: tuple[int, ...] = ()  # layers without a "next_attention_read"


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a forward reads from the host: evaluated leaves, filled in place before it is run."""

    ids: mx.array  # int32 [R]
    memory: mx.array | None = None  # [R, P], rows of a host table; None where a family has none

    @property
    def rows(self) -> int:
        """R."""
        return self.ids.shape[0]


class Model(Protocol):
    """One loaded network of any family."""

    facts: Facts
    dtype: mx.Dtype

    def new_state(self) -> SequenceState:
        """The state of an empty sequence."""

    def blank(self, rows: int) -> Inputs:
        """Evaluated leaves for a forward of `rows` rows, with nothing in them yet."""

    def fill(self, inputs: Inputs, ids: Sequence[int], state: SequenceState) -> None:
        """Write the rows of `ids` into the leaves, and capture what the host keeps of them.

        Args:
            inputs: of `blank(len(ids))`; nothing that reads them may have been submitted.
            ids: R token ids in range.
            state: the sequence they continue.
        """

    def forward(
        self,
        inputs: Inputs,
        state: SequenceState,
        *,
        tap: Tap | None = None,
        submit: Submit | None = None,
    ) -> mx.array:
        """Build the graph of R rows of one sequence; their effect on `state` waits for a commit.

        Args:
            inputs: leaves, filled or not; read only when the graph is run.
            state: between forwards (nothing captured).
            tap: see `Tap`.
            submit: see `Submit`; None builds the whole graph first.

        Returns:
            [R, H], the input of `logits`; lazy.
        """

    def logits(self, hidden: mx.array) -> mx.array:
        """Scores [R, V] of hidden rows [R, H]; lazy."""

    def contract(self, kind: str, layer: int, residual: mx.array) -> mx.array:
        """One tap [R, H] of the residual after `layer`; `kind` is one of `facts.contractions`."""


@runtime_checkable
class ReadsAhead(Protocol):
    """A model whose host rows can be asked for before they are needed."""

    def prefetch(self, ids: Sequence[int], state: SequenceState, *, skip: int = 0) -> None:
        """Begin to read the host rows of `ids[skip:]` in the background; changes no state.

        Args:
            ids: in range; they continue `state`.
            state: only what is committed counts; a forward may be built on it.
            skip: leading ids whose rows are not wanted.
        """

    def counters(self) -> dict[str, int]:
        """Running totals of host reads, by name; any thread may ask."""


def read_ahead(model: Model, ids: Sequence[int], state: SequenceState, *, skip: int = 0) -> None:
    """`ReadsAhead.prefetch` where the family reads the host for its rows."""
    if isinstance(model, ReadsAhead):
        model.prefetch(ids, state, skip=skip)


def host_counters(model: Model) -> dict[str, int]:
    """`ReadsAhead.counters` where the family reads the host for its rows."""
    return model.counters() if isinstance(model, ReadsAhead) else {}


def run_rows(
    model: Model,
    ids: Sequence[int],
    state: SequenceState,
    *,
    tap: Tap | None = None,
    submit: Submit | None = None,
) -> mx.array:
    """Fill inputs and build a forward over them in one go; see `Model.forward`."""
    inputs = model.blank(len(ids))
    model.fill(inputs, ids, state)
    return model.forward(inputs, state, tap=tap, submit=submit)


def blank_ids(rows: int) -> mx.array:
    """An evaluated int32 leaf [rows]."""
    return blank_rows((rows,), np.int32)


def blank_rows(shape: tuple[int, ...], dtype: type[np.generic]) -> mx.array:
    """An evaluated leaf, made by the host: evaluating zeros would wait for what a device runs."""
    return mx.array(np.zeros(shape, dtype))


def write_ids(leaf: mx.array, ids: Sequence[int]) -> None:
    """Write token ids into a leaf in place."""
    np.array(leaf, copy=False)[:] = ids


def every(layers: int) -> Submit | None:
    """Hand rows to the device every so many layers; 0 is never."""
    if not layers:
        return None

    def submit(index: int, residual: mx.array) -> None:
        if (index + 1) % layers == 0:
            mx.async_eval(residual)

    return submit


def arrays_in(owner: object) -> list[mx.array]:
    """All arrays that an object and the blocks it is made of hold."""
    if isinstance(owner, mx.array):
        return [owner]
    if isinstance(owner, list | tuple):
        return [array for item in owner for array in arrays_in(item)]
    if type(owner).__module__.startswith("target_svc.models."):
        return [
            array for item in getattr(owner, "__dict__", {}).values() for array in arrays_in(item)
        ]
    return []
