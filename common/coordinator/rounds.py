"""One round from plan to verdict: Draft, Drafted, Verify, Verified.

Owns the key of the round, what was sent for it, and what its times teach the policy. Does not know
the request before or after it.
Invariant: `Verify` is made once; asking again gives the same message.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from common.coordinator.events import (
    Command,
    DraftTook,
    RoundDone,
    Scene,
    StrikeDrafter,
    ToDrafter,
    ToTarget,
)
from common.policy.copies import Copy, CopyFinder
from common.policy.policy import RoundPolicy, RoundResult
from common.wire.messages import Draft, Drafted, DraftFailed, RoundKey, Sampling, Verified, Verify

logger = logging.getLogger(__name__)

# The drafter gives up a little before the coordinator does, so that its own word, which tells a
# context that is still being fed from silence, comes first.
DRAFTER_SHARE: Final = 0.8
FAULTY: Final = ("late", "fault")  # reasons of DraftFailed that are the drafter's own doing


class Drawing(NamedTuple):
    """How drafts are drawn: temperature 0 takes the best."""

    temperature: float
    seed: int


BEST: Final = Drawing(0.0, 0)


class RoundFault(Exception):
    """The target's verdict contradicts the round; the request cannot go on."""


class Round:
    """One round of one session.

    Args:
        key: its identity; draft_id 0 for a plain round.
        n_drafts: drafts to ask for; 0 for a plain round.
        n_left: tokens the request may still get.
        policy: chooses rows and learns.
        started_at: monotonic seconds.
        scene: the world at its start.
        copy: drafts from the committed ids, verified instead of a drafter's; None: no copy.
        reason: why the policy planned a plain round; "" when it did not.
        drawing: how the drafter is to draw; `BEST` takes the best drafts.
    """

    def __init__(
        self,
        key: RoundKey,
        n_drafts: int,
        n_left: int,
        policy: RoundPolicy,
        started_at: float,
        scene: Scene,
        copy: Copy | None = None,
        reason: str = "",
        drawing: Drawing = BEST,
    ) -> None:
        self.key = key
        self._drawing = drawing
        self._reason = reason
        self._copy = copy
        self.started_at = started_at
        self._n_drafts = n_drafts
        self._n_left = n_left
        self._policy = policy
        self._is_solo = scene.is_solo
        self._deadline_ms = scene.draft_deadline_s * 1e3
        self._order: Verify | None = None
        self._confidences: tuple[float, ...] = ()
        self._draft_ms = 0.0  # until the draft came or was given up
        self._drafter_ms = 0.0  # of it, the drafter's own work

    @property
    def is_drafting(self) -> bool:
        """Whether the drafter is awaited."""
        return self._order is None

    @property
    def plain_reason(self) -> str:
        """Why this round runs one row, if it does."""
        if self._reason:
            return self._reason
        return "not_worth_it" if self._confidences else "no_draft_came"

    def begin(self) -> list[Command]:
        """The round's first message."""
        if self._copy is not None:
            ids = self._copy.ids
            self._order = Verify(self.key, len(ids) + 1, 0.0, ids)
            return [ToTarget(self._order)]
        if not self._n_drafts:
            return [self._verify(1)]
        deadline_ms = DRAFTER_SHARE * self._deadline_ms
        temperature, seed = self._drawing
        return [ToDrafter(Draft(self.key, self._n_drafts, deadline_ms, temperature, seed))]

    def takes(self, event: Drafted | DraftFailed | Verified) -> bool:
        """Whether a message belongs to this round and is awaited now."""
        if isinstance(event, Verified):
            return self._order is not None and event.key == self._order.key
        return self.is_drafting and event.key == self.key

    def advance(
        self, event: Drafted | DraftFailed | Verified, now: float, scene: Scene
    ) -> list[Command]:
        """Take a message that `takes` let in.

        Raises:
            RoundFault: a verdict that cannot be true; nothing was learned from it.
        """
        match event:
            case Drafted():
                return self._on_drafted(event, now)
            case DraftFailed():
                commands = self.give_up(now)
                if event.reason in FAULTY:
                    commands.insert(0, StrikeDrafter(f"draft failed: {event.reason}"))
                return commands
            case Verified():
                return [self._on_verified(event, now, scene)]

    def give_up(self, now: float, *, is_late: bool = False) -> list[Command]:
        """Go on without a draft."""
        self._draft_ms = (now - self.started_at) * 1e3
        verify = self._verify(1)
        return [StrikeDrafter("draft late"), verify] if is_late else [verify]

    def repeat(self) -> list[Command]:
        """The same Verify again; the target answers with its stored verdict if it has run."""
        return [] if self._order is None else [ToTarget(self._order)]

    def _on_drafted(self, event: Drafted, now: float) -> list[Command]:
        fault = self._fault_of(event)
        if fault:
            return [StrikeDrafter(fault), *self.give_up(now)]
        self._draft_ms = (now - self.started_at) * 1e3
        self._drafter_ms = event.ms
        self._confidences = event.confidences
        rows = self._policy.choose(event.confidences, draft_ms=self._draft_ms, n_left=self._n_left)
        return [DraftTook(self._draft_ms), self._verify(rows)]

    def _fault_of(self, event: Drafted) -> str:
        n_drafts = len(event.confidences)
        if not 1 <= n_drafts <= self._n_drafts:
            return f"{n_drafts} confidences, asked for {self._n_drafts} drafts"
        if not all(0.0 <= c <= 1.0 for c in event.confidences):
            return "a confidence outside 0..1"
        return "" if math.isfinite(event.ms) else "a draft time that is no number"

    def _verify(self, rows: int) -> ToTarget:
        key = self.key if rows > 1 else replace(self.key, draft_id=0)
        self._order = Verify(key, rows, self._deadline_ms if rows > 1 else 0.0)
        return ToTarget(self._order)

    def _on_verified(self, event: Verified, now: float, scene: Scene) -> Command:
        self._check(event)
        is_solo = self._is_solo and scene.is_solo
        wall_ms = (now - self.started_at) * 1e3
        logger.debug(
            "round %d: rows %d, accepted %d, draft %.2f ms (drafter %.2f), verify %.2f, wall %.2f",
            *(event.key.round_index, event.rows_run, event.n_accepted),
            *(self._draft_ms, self._drafter_ms, event.ms, wall_ms),
        )
        if not is_solo:  # the wait behind others says nothing about drafting
            wall_ms = min(wall_ms, self._drafter_ms + event.ms + event.wait_ms)
        self._policy.observe(
            RoundResult(
                is_drafted=self._n_drafts > 0,
                rows=event.rows_run,
                n_accepted=event.n_accepted,
                wall_ms=wall_ms,
                draft_ms=self._draft_ms if is_solo else self._drafter_ms,
                confidences=self._confidences,
                is_solo=is_solo,
                is_final=bool(event.finish),
                copy_suffix_len=self._copy.suffix_len if self._copy else 0,
                certainty=event.certainty,
            )
        )
        return RoundDone(
            rows=event.rows_run,
            n_accepted=event.n_accepted,
            n_tokens=len(event.ids),
            near_ties=event.near_ties,
            draft_s=self._draft_ms / 1e3,
            verify_s=event.ms / 1e3,
        )

    def _check(self, event: Verified) -> None:
        ordered = self._order.rows if self._order is not None else 0
        most = event.n_accepted + 1
        is_consistent = (
            1 <= event.rows_run <= ordered
            and 0 <= event.n_accepted < event.rows_run
            and len(event.pieces) == len(event.ids) <= min(most, self._n_left)
            and (bool(event.finish) or len(event.ids) == most)
        )
        if not is_consistent:
            raise RoundFault(
                f"verdict of round {event.key.round_index}: {event.rows_run} rows run, "
                f"{event.n_accepted} accepted, {len(event.ids)} ids; it was asked for "
                f"{ordered} rows with {self._n_left} tokens left"
            )


class RoundSequence:
    """The rounds of one session, one at a time, each with its key.

    Attributes:
        current: the round that runs; None between rounds and sessions.
        memory: prompt and committed ids, where copies are looked for; None: no copies.
    """

    def __init__(self, sampling: Sampling) -> None:
        is_drawn = sampling.acceptance == "residual" and sampling.temperature > 0
        self._drawing = Drawing(sampling.temperature, sampling.seed) if is_drawn else BEST
        self.current: Round | None = None
        self.memory: CopyFinder | None = None
        self._next_key = RoundKey("", 0, 0, 0, 0, 0)
        self._draft_count = 0  # over all sessions of the request: a draft id is never used twice

    @property
    def is_drafting(self) -> bool:
        """Whether a drafter is awaited."""
        return self.current is not None and self.current.is_drafting

    def start(self, session: str, epoch: int, base: int, anchor_id: int) -> None:
        """The session's first round begins at this anchor."""
        self._next_key = RoundKey(session, epoch, 0, base, anchor_id, 0)

    def begin(
        self, policy: RoundPolicy, block_size: int, n_left: int, now: float, scene: Scene
    ) -> list[Command]:
        """Plan the next round; returns its first message."""
        copy = self._worthwhile_copy(policy, n_left)
        if copy is not None:
            self.current = Round(self._next_key, 0, n_left, policy, now, scene, copy)
            return self.current.begin()
        plan = policy.plan(block_size=block_size, n_left=n_left, is_solo=scene.is_solo)
        self._draft_count += plan.draft
        key = replace(self._next_key, draft_id=self._draft_count if plan.draft else 0)
        named = key, plan.n_drafts, n_left, policy, now, scene
        self.current = Round(*named, reason=plan.reason, drawing=self._drawing)
        return self.current.begin()

    def remember(self, ids: Sequence[int]) -> None:
        """Ids of the prompt, or newly committed ones."""
        if self.memory is not None:
            self.memory.extend(ids)

    def _worthwhile_copy(self, policy: RoundPolicy, n_left: int) -> Copy | None:
        copy = self.memory.find() if self.memory is not None else None
        if copy is None:
            return None
        rows = policy.price_copy(copy, n_left=n_left)
        return replace(copy, ids=copy.ids[: rows - 1]) if rows > 1 else None

    def finish(self, event: Verified) -> None:
        """The current round has its verdict; the next one begins at the bonus."""
        self.current = None
        if not event.finish:
            self._next_key = replace(
                event.key,
                round_index=event.key.round_index + 1,
                base=event.key.base + event.n_accepted + 1,
                anchor_id=event.ids[-1],
            )

    def stop(self) -> None:
        """The session is gone, and its round with it."""
        self.current = None
