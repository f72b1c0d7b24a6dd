"""Run a prompt in chunks.

Owns chunk sizes and what is handed out after each. Does not know sessions or sockets. Features
leave chunk by chunk, so a drafter's context grows while the prompt still runs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from common.errors import BadRequest
from target_svc.accept import NO_DRAFTS, TokenLogprobs, decide
from target_svc.distribution import Sampling
from target_svc.models.family import Model, read_ahead, run_rows
from target_svc.models.state import SequenceState
from target_svc.rollback import commit
from target_svc.taps import Taps


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """One chunk has run."""

    done: int  # prompt tokens forwarded
    total: int
    first_pos: int  # of this chunk's features
    features: mx.array | None  # [S, Hd] of this chunk, evaluated; None without taps
    anchor_id: int | None = None  # last step only: the token that follows the prompt
    near_tie: bool = False  # last step only
    logprobs: tuple[TokenLogprobs, ...] = ()  # last step only: of the anchor, where asked for


def prefill_steps(
    model: Model,
    state: SequenceState,
    prompt_ids: Sequence[int],
    *,
    chunk: int,
    taps: Taps | None,
    sampling: Sampling,
) -> Iterator[PrefillStep]:
    """Forward and commit the prompt, one chunk per step; each step evaluates.

    Raises:
        BadRequest: the prompt is empty or an id is outside the vocabulary; nothing changed.
        NotFinite: the last row has no finite score.
    """
    check_ids(prompt_ids, model.facts.vocab_size, "prompt")
    if not prompt_ids:
        raise BadRequest("prompt has 0 tokens; it needs at least 1")
    total = len(prompt_ids)
    for start in range(0, total, chunk):
        ids = prompt_ids[start : start + chunk]
        tap = None if taps is None else taps.collector()
        read_ahead(model, prompt_ids[start : start + 2 * chunk], state, skip=chunk)
        hidden = run_rows(model, ids, state, tap=tap)
        features = None if tap is None else tap.features()
        commit(state, len(ids))
        done = start + len(ids)
        if done < total:
            _evaluate(hidden, features, state)
            yield PrefillStep(done, total, start, features)
            continue
        logits = model.logits(hidden[-1:])
        _evaluate(logits, features, state)
        decision = decide(logits, NO_DRAFTS, sampling, total)
        near = decision.near_ties > 0
        yield PrefillStep(done, total, start, features, decision.ids[0], near, decision.logprobs)


def check_ids(ids: Sequence[int], vocab_size: int, what: str) -> None:
    """Raise BadRequest for the first id outside the vocabulary."""
    for index, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise BadRequest(
                f"{what} id {token} at index {index} is outside the vocabulary 0..{vocab_size - 1}"
            )


def _evaluate(result: mx.array, features: mx.array | None, state: SequenceState) -> None:
    extra = [] if features is None else [features]
    mx.eval(result, *extra, *state.arrays())
