"""Rounds of the target's sessions: when one runs, what it is told, and what follows a fault.

Owns the wait for a block, the graph that is built during it, and the retry of a round whose rows
could not be rolled back. Does not know sockets, prompts or the policy.

Invariant: a round runs at most once. A repeated Verify gets the stored verdict; a Verify or Block
that does not match its seat is dropped and counted.
"""

import logging
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Final

from common.errors import BadRequest, EngineError
from common.net.transport import CONTROL_PEER, Peer, Send
from common.wire.messages import Block, Draft, Drafted, DraftFailed, Verified, Verify
from target_svc.engine import Engine
from target_svc.frames import logprob_fields, sources_of
from target_svc.links import FeatureLinks
from target_svc.rules import Source
from target_svc.seat import Retry, Seat
from target_svc.verify import Verdict

logger = logging.getLogger(__name__)

MAX_REBUILDS: Final = 2  # in a row, of one session; a third fault is not the state's


class Rounds:
    """Runs rounds of any seat.

    Args:
        engine: loaded.
        send: hands a message to the I/O thread.
        links: fed with the features of every round.
        chunks: seats whose `steps` are to be run, one at a time, by whoever owns the queue.
        counters: where drops, late blocks and rebuilds are counted.
    """

    def __init__(
        self,
        engine: Engine,
        send: Send,
        links: FeatureLinks,
        chunks: deque[Seat],
        counters: Counter[str],
    ) -> None:
        self._engine = engine
        self._send = send
        self._links = links
        self._chunks = chunks
        self._counters = counters

    def verify(self, seat: Seat, order: Verify, now: float) -> None:
        """Run the round that `order` names, or wait for its block, or repeat its verdict."""
        stored = seat.stored_verdict(order.key)
        if stored is not None:
            self._send(CONTROL_PEER, stored)
        elif not seat.expects(order.key) or seat.retry is not None:
            self._counters["stale_verify"] += 1
        elif order.copy_ids:
            self.run(seat, order, order.copy_ids)
        elif order.rows == 1 or order.key.draft_id == 0:
            self.run(seat, order, ())
        elif (block := seat.block_for(order)) is not None:
            self._run_block(seat, order, block)
        else:
            seat.wait_for_block(order, now)

    def draft(self, seat: Seat, order: Draft) -> None:
        """Let the target's own head draft, and keep its block for the round."""
        if not seat.expects(order.key) or seat.retry is not None:
            self._send(CONTROL_PEER, DraftFailed(order.key, "stale"))
            return
        try:
            drafted = seat.session.draft(order.n_drafts)
        except EngineError as fault:
            logger.warning("session %s drafts nothing: %s", seat.name, fault)
            self._send(CONTROL_PEER, DraftFailed(order.key, "fault"))
            return
        self._counters["own_drafts"] += 1
        seat.take_block(Block(order.key, drafted.ids, drafted.confidences))
        self._send(CONTROL_PEER, Drafted(order.key, drafted.confidences, drafted.ms))

    def block(self, peer: Peer, seat: Seat | None, block: Block, now: float) -> None:
        """Keep a block for its round, or run the round that waits for it."""
        if seat is None or seat.link != peer or not seat.take_block(block):
            self._counters["stale_block"] += 1
        elif seat.waiting is not None and seat.block_for(seat.waiting.order) is not None:
            self._run_block(seat, seat.waiting.order, block, seat.waited_ms(now))
        else:
            seat.session.prefetch(block.ids)

    def give_up_waiting(self, seat: Seat, now: float) -> None:
        """Run one row: the block did not come in time."""
        if seat.waiting is not None:
            self._counters["late_blocks"] += 1
            self.run(seat, seat.waiting.order, (), seat.waited_ms(now))

    def _run_block(self, seat: Seat, order: Verify, block: Block, waited_ms: float = 0.0) -> None:
        """Run a round on a drafter's block; one whose drafts were drawn from nothing is left."""
        try:
            sources = sources_of(block)
        except BadRequest as fault:
            self._links.lose(seat, fault.message)
            self.run(seat, order, (), waited_ms)
            return
        self.run(seat, order, block.ids, waited_ms, sources)

    def run(
        self,
        seat: Seat,
        order: Verify,
        draft_ids: Sequence[int],
        waited_ms: float = 0.0,
        sources: Sequence[Source] = (),
    ) -> None:
        """Run one round; where its rows cannot be rolled back, make the state again first."""
        drafts = self._usable(seat, draft_ids[: order.rows - 1])
        try:
            with seat.reads.counted():
                is_copy = bool(order.copy_ids)
                rows = len(drafts) + 1
                result = seat.session.verify(
                    drafts, rows, sources=sources, is_copy=is_copy, ends=seat.ends
                )
        except EngineError as fault:
            self._rebuild(seat, order, waited_ms, fault)
            return
        seat.n_rebuilds = 0
        self._answer(seat, order, result, waited_ms)

    def resume(self, seat: Seat, retry: Retry) -> None:
        """Run one chunk of a seat's rebuild, and after the last one its round."""
        with seat.reads.counted():
            step = next(seat.steps, None)
        if step is not None:
            self._chunks.append(seat)
            return
        seat.retry = None
        self.run(seat, retry.order, (), retry.waited_ms)  # one row: nothing to roll back

    def prepare(self, seats: Iterable[Seat]) -> bool:
        """Build the next graph of one session that has none; True if another lacks one too."""
        if not self._engine.plan.prebuilds:
            return False
        idle = [seat for seat in seats if seat.may_prepare]
        if idle:
            idle[0].session.prepare(idle[0].awaited_rows)
        return len(idle) > 1

    def _answer(self, seat: Seat, order: Verify, result: Verdict, waited_ms: float) -> None:
        emission, reads = seat.emit(result.ids), seat.reads.take()
        verdict = Verified(
            key=order.key,
            rows_run=result.rows_run,
            n_accepted=result.n_accepted,
            ids=emission.ids,
            pieces=emission.pieces,
            finish=emission.finish,
            tail=emission.tail,
            near_ties=result.near_ties,
            ms=result.build_ms + result.eval_ms,
            wait_ms=waited_ms,
            **logprob_fields(result.logprobs[: len(emission.ids)]),
            build=result.build,
            first_ms=result.first_ms,
            ngram_hits=reads.hits,
            ngram_misses=reads.misses,
            certainty=result.certainty,
        )
        seat.finish_round(verdict)
        self._counters["verifies"] += 1
        self._counters["prebuilt"] += result.is_prebuilt
        self._send(CONTROL_PEER, verdict)
        if not emission.finish:
            self._links.push(seat, result.first_pos, result.features)

    def _rebuild(self, seat: Seat, order: Verify, waited_ms: float, fault: EngineError) -> None:
        """Begin to make the session's state again from its committed ids.

        Raises:
            EngineError: `fault`, where that was done twice in a row already.
        """
        if seat.n_rebuilds >= MAX_REBUILDS:
            raise fault
        logger.warning("session %s is prefilled again: %s", seat.name, fault)
        self._counters["rebuilds"] += 1
        seat.n_rebuilds += 1
        seat.waiting = None
        seat.steps = seat.session.rebuild()
        seat.retry = Retry(order, waited_ms)
        self._chunks.append(seat)

    def _usable(self, seat: Seat, draft_ids: Sequence[int]) -> tuple[int, ...]:
        """The drafts, or none where one is outside the vocabulary: advice, so never an error."""
        vocab = self._engine.card.vocab_size
        if all(0 <= token < vocab for token in draft_ids):
            return tuple(draft_ids[: self._engine.most_rows - 1])
        self._links.lose(seat, f"draft ids {tuple(draft_ids)} leave the vocabulary 0..{vocab - 1}")
        return ()
