"""One request's place at the target: its engine session, text, link and present round.

Owns what the service must remember about one session between messages, and the rules that end a
text: a stop token and a stop string, which are no part of it, and max_tokens. Does not know
sockets, the wire, other sessions or the policy.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass

from common.net.transport import Peer
from common.wire.messages import (
    Block,
    Opened,
    Prefilled,
    RoundKey,
    Sampling,
    Verified,
    Verify,
)
from target_svc.host_reads import HostReads
from target_svc.prefill import PrefillStep
from target_svc.session import Session
from target_svc.stops import StopStrings
from target_svc.text import Detokenizer
from target_svc.verify import Ends


@dataclass(frozen=True, slots=True)
class Emission:
    """What of some newly committed ids belongs to the text.

    Attributes:
        ids: the ids that are part of the text, cut before a stop token, behind or before the id
            that completes a stop string (before it, if no text came with it), and at max_tokens.
        pieces: one text piece per id; "" while a character is incomplete or the text may begin a
            stop string.
        finish: "" while the text goes on, else "stop" or "length".
        tail: text that was still held back; only with a finish.
    """

    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    finish: str
    tail: str


@dataclass(frozen=True, slots=True)
class BlockWait:
    """A Verify whose block has not come; times in monotonic seconds."""

    order: Verify
    since: float
    until: float


@dataclass(frozen=True, slots=True)
class Retry:
    """A round that is run again, in one row, once the session's state is made anew."""

    order: Verify
    waited_ms: float


class Seat:
    """State of one session between messages.

    Attributes:
        reads: what the session read of the host's tables.
        session: the engine's session; `base` and `anchor_id` of the present round live there.
        next_round: index of the round that may run next.
        link: the drafter's data link, None while there is none.
        sent_pos: absolute position of the next feature row the link has not been sent.
        waiting: the Verify whose block has not come, and when that wait ends; else None.
        block: the one block kept for the present round, or None.
        last: the verdict of the previous round, for a repeated Verify.
        answers: what this session's Open was answered, for a repeated Open.
        steps: chunks of the prompt, or of a rebuild, that are still to be run.
        retry: the round that waits for a rebuild, else None.
        n_rebuilds: in a row, without a round between them.
    """

    def __init__(
        self,
        *,
        name: str,
        epoch: int,
        ticket: str,
        sampling: Sampling,
        session: Session,
        reads: HostReads,
        steps: Iterator[PrefillStep],
        text: Detokenizer,
        stop_ids: frozenset[int],
    ) -> None:
        self.name = name
        self.epoch = epoch
        self.ticket = ticket
        self.session = session
        self.reads = reads
        self.steps = steps
        self.next_round = 0
        self.link: Peer | None = None
        self.sent_pos = 0
        self.waiting: BlockWait | None = None
        self.block: Block | None = None
        self.last: Verified | None = None
        self.answers: list[Opened | Prefilled] = []
        self.retry: Retry | None = None
        self.n_rebuilds = 0
        self._is_finished = False
        self._text = text
        self._stops = StopStrings(sampling.stop)
        self._stop_ids = frozenset(sampling.stop_ids) | (
            frozenset() if sampling.ignore_eos else stop_ids
        )
        self._n_generated = 0
        self._max_tokens = sampling.max_tokens

    def emit(self, ids: Sequence[int]) -> Emission:
        """Turn newly committed ids into text and apply the rules that end it."""
        kept: list[int] = []
        pieces: list[str] = []
        finish = ""
        for token in ids:
            if token in self._stop_ids:
                finish = "stop"
                break
            shown = self._stops.push(self._text.push(token))
            if shown.is_stopped and not shown.text:
                finish = "stop"
                break
            kept.append(token)
            pieces.append(shown.text)
            self._n_generated += 1
            if shown.is_stopped:
                finish = "stop"
                break
            if self._n_generated >= self._max_tokens:
                finish = "length"
                break
        self._is_finished = bool(finish)
        if not finish:
            return Emission(tuple(kept), tuple(pieces), "", "")
        last = self._stops.push(self._text.finish())
        tail = last.text + self._stops.finish()
        return Emission(tuple(kept), tuple(pieces), "stop" if last.is_stopped else finish, tail)

    @property
    def ends(self) -> Ends | None:
        """Cuts ids behind the one that completes a stop string; None without stop strings.

        What is behind it must not enter the state: a following turn goes on from where text ends.
        """
        return self._up_to_stop if self._stops.is_needed else None

    def _up_to_stop(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        text, stops = self._text.twin(), copy(self._stops)
        for index, token in enumerate(ids):
            if stops.push(text.push(token)).is_stopped:
                return ids[: index + 1]
        return ids

    def replay(self, ids: Sequence[int]) -> None:
        """Ids of the reply that reached the client before this session; none of them ended it."""
        for token in ids:
            self._stops.push(self._text.push(token))
        self._n_generated += len(ids)

    @property
    def awaited_rows(self) -> int | None:
        """Rows of the round that waits for its block."""
        return None if self.waiting is None else self.waiting.order.rows

    @property
    def may_prepare(self) -> bool:
        """Whether another round may come, its rows can be told, and no graph stands ready."""
        is_open = not self._is_finished and self.retry is None
        return is_open and self.session.can_prepare(self.awaited_rows)

    def expects(self, key: RoundKey) -> bool:
        """Whether `key` names the round that may run now."""
        return (
            key.epoch == self.epoch
            and key.round_index == self.next_round
            and key.base == self.session.base
            and key.anchor_id == self.session.anchor_id
        )

    def stored_verdict(self, key: RoundKey) -> Verified | None:
        """The verdict to repeat, if `key` names the round that ran last."""
        if self.last is not None and self.last.key == key:
            return self.last
        return None

    def take_block(self, block: Block) -> bool:
        """Keep `block` for the present round; False if it belongs to another."""
        if not self.expects(block.key):
            return False
        self.block = block
        return True

    def block_for(self, verify: Verify) -> Block | None:
        """The kept block, if it is the one `verify` names."""
        if self.block is not None and self.block.key.draft_id == verify.key.draft_id:
            return self.block
        return None

    def wait_for_block(self, order: Verify, now: float) -> None:
        """Hold `order` until its block comes or its deadline passes; a repeat changes nothing."""
        if self.waiting is not None and self.waiting.order == order:
            return
        self.waiting = BlockWait(order, now, now + order.block_deadline_ms / 1e3)

    def waited_ms(self, now: float) -> float:
        """How long the present round has waited for its block."""
        return 0.0 if self.waiting is None else (now - self.waiting.since) * 1e3

    def finish_round(self, verdict: Verified) -> None:
        """Remember the verdict and make room for the next round."""
        self.last = verdict
        self.next_round = verdict.key.round_index + 1
        self.waiting = None
        self.block = None
