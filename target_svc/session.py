"""One sequence at a target: prompt, rounds, and what it remembers for who drafts.

Owns the order prefill, rounds, close, and what a session remembers for a late drafter. Does not
know messages, threads, text rules or policy.

Invariant: between calls a session's state holds exactly the tokens at positions 0..base-1; the
anchor, at position `base`, is committed but not forwarded. Only the anchor and accepted drafts are
ever committed to state.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import mlx.core as mx

from common.errors import BadRequest, EngineError
from target_svc.accept import Drafts
from target_svc.build import Build
from target_svc.card import EngineCard
from target_svc.distribution import Sampling, counts_tokens
from target_svc.models.family import Model, read_ahead
from target_svc.mtp import CHAIN, ChainDraft, HeadTaps
from target_svc.prefill import PrefillStep, check_fits, check_ids, prefill_steps
from target_svc.prefix_cache import Context, PrefixCache, Share, kept_after
from target_svc.rules import Source
from target_svc.seen import Seen
from target_svc.taps import FeatureStore, Taps
from target_svc.verify import Ends, Verdict, VerifyPlan, run_round


class Host(Protocol):
    """What a session asks of its engine."""

    model: Model
    card: EngineCard
    plan: VerifyPlan
    prefill_chunk: int
    prefixes: PrefixCache

    @property
    def most_rows(self) -> int:
        """Rows of the widest verify."""
        ...

    def fits(self, built: int, rows: int) -> bool:
        """Whether a graph of `built` rows serves a verify of `rows`."""
        ...


class Session:
    """One sequence at this target.

    Attributes:
        base: absolute position of the anchor; the prompt starts at 0.
        anchor_id: last committed token, not yet forwarded; valid after prefill.
        n_cached: tokens of the prompt that needed no forward; valid after the first step.
    """

    def __init__(
        self,
        host: Host,
        sampling: Sampling,
        taps: Taps | HeadTaps | None,
        owner: str | None = None,
    ) -> None:
        self._host = host
        self._sampling = sampling
        self._taps = taps
        self._state = host.model.new_state()
        self._store = FeatureStore(taps.plan.window) if isinstance(taps, Taps) else None
        self._head = taps.context() if isinstance(taps, HeadTaps) else None
        self._standing: Build | None = None
        self._last_rows, self._streak = 1, host.plan.steady  # as if plain rounds had run
        self._ids: list[int] = []  # committed, the anchor last
        self._seen: Seen | None = None  # only where the sampling counts tokens
        self._share = Share(host.prefixes, owner, type(taps).__name__)
        self._is_sound = True  # no round has failed since the state was made
        self._is_closed = False
        self._is_prefilled = False
        self.anchor_id = -1
        self.n_cached = 0

    @property
    def base(self) -> int:
        """Absolute position of the anchor."""
        return self._state.base

    def prefill(self, prompt_ids: Sequence[int], n_replayed: int = 0) -> Iterator[PrefillStep]:
        """Run the prompt, one chunk per `next`; the last step holds the anchor.

        Args:
            prompt_ids: the prompt, and on a replay the reply so far.
            n_replayed: of them, how many at the end are the reply's.

        Raises:
            BadRequest: the prompt is empty or holds an id outside the vocabulary.
            TooLong: the prompt does not fit the context with one token more.
            EngineError: the session was prefilled already, or is closed.
        """
        self._check_open(prefilled=False)
        check_fits(prompt_ids, self._host.card.context_len)
        if counts_tokens(self._sampling):
            n_prompt = len(prompt_ids) - n_replayed
            self._seen = Seen(prompt_ids[:n_prompt], prompt_ids[n_prompt:])
        found = self._share.find(prompt_ids)
        if found is not None:
            self._state, self._store, self._head = found.state, found.store, found.head
            self.n_cached = self.base
        kept = kept_after(self.base, len(prompt_ids), self._host.prefill_chunk)
        for step in self._run_prompt(prompt_ids, self._taps, kept):
            after = [] if step.anchor_id is None else [step.anchor_id]
            self._remember(step.features, [*prompt_ids[step.first_pos + 1 : step.done + 1], *after])
            if step.anchor_id is not None:
                self.anchor_id = step.anchor_id
                self._ids = [*prompt_ids, step.anchor_id]
                self._count([step.anchor_id])
                self._is_prefilled = True
            if step.done in kept or self._is_prefilled:
                self._keep(prompt_ids[: step.done])
            yield step

    def rebuild(self) -> Iterator[PrefillStep]:
        """Make the state again from the committed ids, one chunk per `next`.

        For a round that could not be rolled back. The anchor stays, and so do stored features;
        those of the steps were handed out before. Kept prefixes of these ids are dropped.

        Raises:
            EngineError: the session has no anchor or is closed.
        """
        self._check_open(prefilled=True)
        self._standing = None
        self._share.forget(self._ids)
        self._state = self._host.model.new_state()
        yield from self._run_prompt(self._ids[:-1], None)
        self._is_sound = True
        self._keep_all()

    def can_prepare(self, rows: int | None = None) -> bool:
        """Whether no graph stands ready for a verify that may come, and its rows can be told."""
        is_told = rows is not None or self._streak >= self._host.plan.steady
        return is_told and self._is_prefilled and not self._is_closed and self._standing is None

    def prepare(self, rows: int | None = None) -> None:
        """Build the graph of the next verify on empty leaves, if `can_prepare`; nothing is run.

        Args:
            rows: of the next verify; None takes it to be as wide as the last ones.
        """
        if not self.can_prepare(rows):
            return
        plan = self._host.plan
        rows = plan.width or rows or self._last_rows
        self._standing = Build(self._host.model, self._state, rows, self._taps, plan.build)

    def prefetch(self, draft_ids: Sequence[int]) -> None:
        """Begin to read what a verify of these drafts will need of the host; returns at once.

        Drafts are advice: ids outside the vocabulary are left alone here; `verify` refuses them.
        """
        vocab = self._host.card.vocab_size
        if self._is_prefilled and not self._is_closed and all(0 <= i < vocab for i in draft_ids):
            read_ahead(self._host.model, [self.anchor_id, *draft_ids], self._state)

    def verify(
        self,
        draft_ids: Sequence[int],
        rows: int,
        *,
        sources: Sequence[Source] = (),
        is_copy: bool = False,
        ends: Ends | None = None,
    ) -> Verdict:
        """Run one round: the anchor and the first `rows - 1` drafts, fewer where fewer are given.

        Args:
            draft_ids: proposed ids for positions base + 1 on.
            rows: 1..max_rows; 1 is a plain round.
            sources: what each draft was drawn from; empty where the best ones were taken.
            is_copy: the drafts are taken from earlier text.
            ends: cuts ids where their text ends the reply.

        Raises:
            BadRequest: rows out of range or a draft outside the vocabulary; nothing changed.
            EngineError: the session has no anchor or is closed, or a round failed that was not
                rebuilt; nothing changed.
            NotFinite: no finite scores; rebuild, or verify again where the plan does not overlap.
            RollBackRefused: the state cannot take the rejected rows back; nothing changed, and
                `rebuild` makes it anew.
        """
        self._check_open(prefilled=True)
        if self.base != len(self._ids) - 1:
            raise EngineError(
                f"state holds {self.base} tokens of {len(self._ids) - 1}; rebuild the session"
            )
        if not 1 <= rows <= self._host.most_rows:
            raise BadRequest(f"rows {rows}; a verify here has 1..{self._host.most_rows}")
        drafts = list(draft_ids[: rows - 1])
        check_ids(drafts, self._host.card.vocab_size, "draft")
        build = self._take_build(len(drafts) + 1)
        self._is_sound = False
        verdict = run_round(
            *(self._host.model, self._state, self.anchor_id),
            Drafts(tuple(drafts), tuple(sources[: len(drafts)]), is_copy=is_copy),
            *(self._host.plan, self._taps, self._sampling),
            seen=self._seen,
            build=build,
            ends=ends,
        )
        self._is_sound = True
        self._standing = verdict.ahead
        self._remember(verdict.features, verdict.ids)
        self._ids.extend(verdict.ids)
        self._count(verdict.ids)
        self.anchor_id = verdict.ids[-1]
        return verdict

    def feature_rows(self, from_pos: int) -> tuple[int, mx.array] | None:
        """Stored rows for a drafter that joins late: the first position, and rows [S, Hd].

        The first position is later than `from_pos` where older rows are no longer kept. None where
        no row is stored from there on, or without taps.
        """
        return None if self._store is None else self._store.rows_from(from_pos)

    def draft(self, n_drafts: int) -> ChainDraft:
        """Let the target's own head propose the tokens after the anchor.

        Raises:
            EngineError: the session has no anchor or is closed, or no head is armed.
        """
        self._check_open(prefilled=True)
        if self._head is None:
            raise EngineError("no head drafts in this session; arm one by policy.source")
        return self._head.draft(min(n_drafts, CHAIN))

    def close(self) -> None:
        """Free the state, after leaving it for who continues; the session can do nothing more."""
        self._keep_all()
        self._is_closed = True
        self._standing = None
        self._state = self._host.model.new_state()
        self._store = None
        self._head = None

    def _run_prompt(
        self, ids: Sequence[int], taps: Taps | HeadTaps | None, settles: Collection[int] = ()
    ) -> Iterator[PrefillStep]:
        host = self._host
        return prefill_steps(
            host.model,
            self._state,
            ids,
            chunk=host.prefill_chunk,
            taps=taps,
            sampling=self._sampling,
            seen=self._seen,
            overlaps=host.plan.overlaps,
            settles=settles,
        )

    def _keep(self, ids: Sequence[int]) -> None:
        """Leave the state, which holds exactly `ids`, for those who begin with them."""
        self._share.keep(ids, Context(self._state, self._store, self._head))

    def _keep_all(self) -> None:
        """`_keep` what the state holds, where no round has failed on it."""
        if self._standing is not None:
            self._standing.abandon()
        if self._is_sound and self._is_prefilled and self.base == len(self._ids) - 1:
            self._keep(self._ids[:-1])

    def _take_build(self, rows: int) -> Build | None:
        """The standing build if it fits the round; else it is abandoned."""
        build, self._standing = self._standing, None
        self._streak = self._streak + 1 if rows == self._last_rows else 1
        self._last_rows = rows
        if build is None or self._host.fits(build.rows, self._host.plan.width or rows):
            return build
        build.abandon()
        return None

    def _remember(self, features: mx.array | None, following: Sequence[int]) -> None:
        """Keep features [S, H] for whoever drafts; `following` are the tokens after their rows."""
        if features is not None and self._store is not None:
            self._store.add(features)
        if features is not None and self._head is not None:
            self._head.extend(features, list(following))

    def _count(self, ids: Sequence[int]) -> None:
        if self._seen is not None:
            self._seen.add(ids)

    def _check_open(self, *, prefilled: bool) -> None:
        if self._is_closed:
            raise EngineError("session is closed; open another")
        if prefilled != self._is_prefilled:
            state = "has run its prompt" if self._is_prefilled else "has no anchor yet"
            raise EngineError(f"session {state}; prefill once, then verify")
