"""One forward of R rows, and the verdict on the drafts among them.

Owns a round's forward; a plain round is R = 1 through the same lines. Does not know drafters,
deadlines or text. Invariant: nothing is committed before the verdict is known to be finite.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from common.errors import DFlashError
from target_svc.accept import Choices, choose, count_accepted
from target_svc.distribution import Sampling
from target_svc.models.family import Model, every, run_rows
from target_svc.models.state import SequenceState
from target_svc.rollback import commit
from target_svc.taps import Taps


@dataclass(frozen=True, slots=True)
class VerifyPlan:
    """How verifies are run, the same for all rounds of a session."""

    width: int | None  # every forward is padded to so many rows; None runs the rows asked for
    pipeline_layers: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one round decided."""

    rows_run: int  # anchor and drafts; padding is not counted
    n_accepted: int  # 0..rows_run-1
    ids: tuple[int, ...]  # accepted drafts and the bonus
    near_ties: int  # among the rows that decided
    first_pos: int  # of `features`: the anchor's position
    features: mx.array | None  # [n_accepted + 1, Hd], evaluated; None without taps
    build_ms: float  # making the graph, and running what was handed over meanwhile
    eval_ms: float  # the rest of running it, and the host read


def run_round(
    model: Model,
    state: SequenceState,
    row_ids: Sequence[int],
    plan: VerifyPlan,
    taps: Taps | None,
    sampling: Sampling,
) -> Verdict:
    """Forward the anchor and its drafts, accept, and keep the accepted rows.

    Args:
        model: the target.
        state: after a commit; changed only when this returns.
        row_ids: anchor, then drafts; all in the vocabulary.
        plan: see `VerifyPlan`.
        taps: None where nobody drafts.
        sampling: how the target chooses.

    Raises:
        NotFinite: a row that decides has no finite score; nothing changed.
    """
    start = time.perf_counter()
    tap = None if taps is None else taps.collector()
    padded = pad_rows(row_ids, plan.width)
    hidden = run_rows(model, padded, state, tap=tap, submit=every(plan.pipeline_layers))
    logits = model.logits(hidden)
    features = None if tap is None else tap.features()
    built = time.perf_counter()
    mx.eval(logits, *([] if features is None else [features]), *state.arrays())
    choices = _choose_or_abandon(logits, state, sampling)
    n_accepted = count_accepted(choices.ids, row_ids[1:])
    keep = n_accepted + 1
    base = state.base
    commit(state, keep)
    if features is not None and keep < len(padded):
        features = features[:keep]
        mx.eval(features)
    end = time.perf_counter()
    return Verdict(
        rows_run=len(row_ids),
        n_accepted=n_accepted,
        ids=choices.ids[:keep],
        near_ties=sum(choices.is_near_tie[:keep]),
        first_pos=base,
        features=features,
        build_ms=(built - start) * 1e3,
        eval_ms=(end - built) * 1e3,
    )


def pad_rows(row_ids: Sequence[int], width: int | None) -> list[int]:
    """Fill up to `width` rows; fillers come last, so they change no row before them."""
    missing = 0 if width is None else max(0, width - len(row_ids))
    return [*row_ids, *[row_ids[0]] * missing]


def _choose_or_abandon(logits: mx.array, state: SequenceState, sampling: Sampling) -> Choices:
    try:
        return choose(logits, sampling, state.base + 1)
    except DFlashError:
        commit(state, 0)
        raise
