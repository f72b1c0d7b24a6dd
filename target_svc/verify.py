"""One forward of R rows, and the verdict on the drafts among them.

Owns a round's forward; a plain round is R = 1 through the same lines. Does not know drafters,
deadlines or text. Invariant: nothing is committed before the verdict is known to be finite, except
the one row of a plain round where the next graph is built while it runs.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

import mlx.core as mx

from common.errors import DFlashError
from target_svc.accept import Drafts, TokenLogprobs, decide
from target_svc.build import Build, BuildPlan, build_and_submit
from target_svc.distribution import Sampling
from target_svc.models.family import Model
from target_svc.models.state import SequenceState
from target_svc.rollback import abandon, commit
from target_svc.seen import Seen
from target_svc.taps import Collects

PREBUILT: Final = " prebuilt"
Ends = Callable[[tuple[int, ...]], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class VerifyPlan:
    """How verifies are run, the same for all rounds of a session."""

    width: int | None = None  # every forward is padded to so many rows; None runs those asked for
    build: BuildPlan = field(default_factory=BuildPlan)
    prebuilds: bool = False  # the next verify's graph is built while there is nothing else to do
    steady: int = 1  # rounds of one width after which the next is taken to be as wide
    overlaps: bool = False  # after a plain round: while it runs; pays where handing over is quick


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one round decided."""

    rows_run: int  # anchor and drafts; padding is not counted
    n_accepted: int  # 0..rows_run-1
    ids: tuple[int, ...]  # accepted drafts and the bonus, up to the first that ends a text
    near_ties: int  # among the rows that decided
    logprobs: tuple[TokenLogprobs, ...]  # one per id where asked for, else empty
    certainty: float  # 0..1, of the target about the token after the accepted prefix
    first_pos: int  # of `features`: the anchor's position
    features: mx.array | None  # [len(ids), Hd], evaluated; None without taps
    build: str  # how the forward was built, as replies show it
    is_prebuilt: bool  # a graph stood ready for these rows
    first_ms: float  # until the device had its first layers
    build_ms: float  # until it had all of them; filling, and making the graph if none stood ready
    eval_ms: float  # the rest of running it, and the host read
    ahead: Build | None  # the graph of a plain round after this one, where it was built meanwhile


def run_round(
    model: Model,
    state: SequenceState,
    anchor_id: int,
    drafts: Drafts,
    plan: VerifyPlan,
    taps: Collects | None,
    sampling: Sampling,
    *,
    seen: Seen | None = None,
    build: Build | None = None,
    ends: Ends | None = None,
) -> Verdict:
    """Forward the anchor and its drafts, accept, and keep the accepted rows.

    Args:
        model: the target.
        state: after a commit, or with `build` standing on it; changed only when this returns.
        anchor_id: the last committed token, not yet forwarded.
        drafts: what stands after it; every id in the vocabulary.
        plan: see `VerifyPlan`.
        taps: None where nobody drafts.
        sampling: how the target chooses.
        seen: ids up to the anchor, where the sampling counts tokens.
        build: a graph of at least so many rows on this state; None makes one.
        ends: cuts ids where their text ends the reply; None: no text does.

    Raises:
        NotFinite: a row that decides has no finite score; nothing changed, but `state.base` where
            the plan overlaps.
        RollBackRefused: the rejected rows cannot be taken back; nothing changed.
    """
    start, row_ids = time.perf_counter(), (anchor_id, *drafts.ids)
    padded = pad_rows(row_ids, plan.width if build is None else build.rows)
    base, ahead = state.base, None
    try:
        if build is not None:
            forward = build.fill(padded).submit()
        else:
            forward = build_and_submit(model, state, padded, taps, plan.build)
        built = time.perf_counter()
        if plan.overlaps and len(padded) == 1:
            commit(state, 1)  # the anchor's own row stays, whatever it scores
            ahead = Build(model, state, 1, taps, plan.build)
        mx.eval(forward.results)
        decision = decide(forward.logits, drafts, sampling, base + 1, seen)
        ids = up_to_end(decision.ids, sampling, model.facts.eos_ids)
        ids = ids if ends is None else ends(ids)
        keep = len(ids)
        if ahead is None:
            commit(state, keep)
    except DFlashError:
        abandon(state)
        raise
    features = forward.features
    if features is not None and keep < len(padded):
        features = features[:keep]
        mx.eval(features)
    end = time.perf_counter()
    return Verdict(
        rows_run=len(row_ids),
        n_accepted=decision.n_accepted,
        ids=ids,
        near_ties=decision.near_ties,
        logprobs=decision.logprobs[:keep],
        certainty=decision.certainty,
        first_pos=base,
        features=features,
        build=plan.build.name + (PREBUILT if build is not None else ""),
        is_prebuilt=build is not None,
        first_ms=(forward.first_at - start) * 1e3,
        build_ms=(built - start) * 1e3,
        eval_ms=(end - built) * 1e3,
        ahead=ahead,
    )


def up_to_end(
    ids: tuple[int, ...], sampling: Sampling, eos_ids: Collection[int]
) -> tuple[int, ...]:
    """Ids up to the first that ends a text: what is behind it must not enter the state.

    Else a following turn, which goes on behind the end, could not go on from that state.
    """
    for index, token in enumerate(ids):
        if token in sampling.stop_ids or (token in eos_ids and not sampling.ignore_eos):
            return ids[: index + 1]
    return ids


def pad_rows(row_ids: Sequence[int], width: int | None) -> list[int]:
    """Fill up to `width` rows; fillers come last, so they change no row before them."""
    missing = 0 if width is None else max(0, width - len(row_ids))
    return [*row_ids, *[row_ids[0]] * missing]
