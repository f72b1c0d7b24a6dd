"""Run a prompt in chunks.

Owns chunk sizes and what is handed out after each. Does not know sessions or sockets. Features
leave chunk by chunk, so a drafter's context grows while the prompt still runs.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from common.errors import BadRequest, TooLong
from target_svc.accept import NO_DRAFTS, TokenLogprobs, decide
from target_svc.distribution import Sampling
from target_svc.models.family import Model, read_ahead, run_rows
from target_svc.models.state import SequenceState
from target_svc.rollback import commit
from target_svc.seen import Seen
from target_svc.taps import Collects


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
    taps: Collects | None,
    sampling: Sampling,
    seen: Seen | None = None,
    overlaps: bool = False,
    settles: Collection[int] = (),
) -> Iterator[PrefillStep]:
    """Forward and commit the prompt, one chunk per step; each step evaluates.

    Args:
        model: the target.
        state: of the first tokens of the prompt, or of none; it is short of the whole. Ends of
            chunks are multiples of `chunk` wherever it begins, so that shapes agree from then on.
        prompt_ids: all of them.
        chunk: rows per forward.
        taps: None where nobody drafts.
        sampling: how the anchor is chosen.
        seen: the ids of the prompt, where the sampling counts tokens.
        overlaps: a chunk is built while the one before it runs, so steps come one chunk later; for
            devices where handing over does not block.
        settles: ends of chunks at whose step the state holds that much and no more.

    Raises:
        BadRequest: the prompt is empty or an id is outside the vocabulary; nothing changed.
        NotFinite: the last row has no finite score.
    """
    check_ids(prompt_ids, model.facts.vocab_size, "prompt")
    if not prompt_ids:
        raise BadRequest("prompt has 0 tokens; it needs at least 1")
    running: _Chunk | None = None
    for start, end in _spans(state.base, len(prompt_ids), chunk):
        read_ahead(model, prompt_ids[start : end + chunk], state, skip=end - start)
        submitted = _submit(model, state, prompt_ids, start, end, taps)
        if running is not None:
            yield running.step(sampling, seen)
        running = submitted
        if not overlaps or end in settles:
            yield running.step(sampling, seen)
            running = None
    if running is not None:
        yield running.step(sampling, seen)


def _spans(start: int, total: int, chunk: int) -> Iterator[tuple[int, int]]:
    """First token and end of each chunk."""
    while start < total:
        end = min(total, (start // chunk + 1) * chunk)
        yield start, end
        start = end


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk that was handed to the device."""

    start: int
    done: int
    total: int
    result: mx.array  # logits [1, V] of the prompt's last row, else hidden rows
    features: mx.array | None

    def step(self, sampling: Sampling, seen: Seen | None) -> PrefillStep:
        """Wait for the chunk."""
        mx.eval(self.result, *([] if self.features is None else [self.features]))
        if self.done < self.total:
            return PrefillStep(self.done, self.total, self.start, self.features)
        decision = decide(self.result, NO_DRAFTS, sampling, self.total, seen)
        return PrefillStep(
            self.done,
            self.total,
            self.start,
            self.features,
            decision.ids[0],
            decision.near_ties > 0,
            decision.logprobs,
        )


def _submit(
    model: Model,
    state: SequenceState,
    prompt_ids: Sequence[int],
    start: int,
    end: int,
    taps: Collects | None,
) -> _Chunk:
    """Forward and commit one chunk; the device has it when this returns."""
    ids = prompt_ids[start:end]
    tap = None if taps is None else taps.collector()
    hidden = run_rows(model, ids, state, tap=tap)
    features = None if tap is None else tap.features()
    commit(state, len(ids))
    total = len(prompt_ids)
    result = hidden if end < total else model.logits(hidden[-1:])
    mx.async_eval(result, *([] if features is None else [features]), *state.arrays())
    return _Chunk(start, end, total, result, features)


def check_fits(prompt_ids: Sequence[int], context_len: int) -> None:
    """Raise TooLong unless the context holds the prompt and one token more."""
    if len(prompt_ids) >= context_len:
        raise TooLong(
            f"prompt has {len(prompt_ids)} tokens; the context of {context_len} leaves room for "
            f"{context_len - 1}"
        )


def check_ids(ids: Sequence[int], vocab_size: int, what: str) -> None:
    """Raise BadRequest for the first id outside the vocabulary."""
    for index, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise BadRequest(
                f"{what} id {token} at index {index} is outside the vocabulary 0..{vocab_size - 1}"
            )
