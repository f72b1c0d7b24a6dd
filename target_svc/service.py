"""The target as an actor: messages in, session calls, messages out.

Owns the seats, the order of prefill chunks and the wait for a block. Does not know sockets,
threads, the policy or how a verify works. Runs on the compute thread.

Invariant: a round runs at most once. A repeated Verify gets the stored verdict; a Verify, Block or
Link that does not match its seat is dropped and counted.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from common.errors import BadRequest, Busy, DFlashError, TooLong
from common.net.transport import CONTROL_PEER, Peer, Send
from common.wire.messages import (
    Block,
    Close,
    Failed,
    Link,
    Message,
    Open,
    Opened,
    Prefilled,
    PrefillProgress,
    Renew,
    Resync,
    Scalar,
    Verified,
    Verify,
)
from common.wire.tensors import Tensor, from_ids, to_text
from target_svc.engine import Engine
from target_svc.frames import ids_of
from target_svc.links import FeatureLinks
from target_svc.prefill import PrefillStep
from target_svc.seat import Seat
from target_svc.text import Detokenizer

logger = logging.getLogger(__name__)


class TargetService:
    """Actor of the target process.

    Args:
        engine: loaded and warmed up.
        send: hands a message to the I/O thread; False when the peer is gone.
        capacity: most sessions at once.
    """

    def __init__(self, engine: Engine, send: Send, capacity: int) -> None:
        self._engine = engine
        self._send = send
        self._capacity = capacity
        self._seats: dict[str, Seat] = {}
        self._prefilling: deque[Seat] = deque()
        self._counters: Counter[str] = Counter(verifies=0)
        self._links = FeatureLinks(send, self._counters)

    # ------------------------------------------------------------------ the actor's face

    def on_message(self, peer: Peer, message: Message, now: float) -> None:
        """Handle one message; a fault of one session never reaches another."""
        match message:
            case Open():
                self._guard(message.session, lambda: self._open(message))
            case Verify():
                self._guard(message.key.session, lambda: self._verify(message, now))
            case Block():
                self._guard(message.key.session, lambda: self._block(peer, message, now))
            case Link():
                self._links.link(peer, message, self._seats.get(message.session))
            case Resync():
                self._links.resync(peer, message, self._seats.get(message.session))
            case Renew():
                self._links.renew(message, self._seats.get(message.session))
            case Close():
                self._close(message.session)
            case _:
                self._drop("unexpected_" + type(message).__name__.lower())

    def on_lost(self, peer: Peer, now: float) -> None:
        """A connection is gone: without the coordinator every session ends, else its link does."""
        if peer == CONTROL_PEER:
            for name in list(self._seats):
                self._close(name)
            return
        for seat in self._seats.values():
            if seat.link == peer:
                self._links.lose(seat, "connection lost")

    def work(self, now: float) -> bool:
        """Run one prefill chunk of the session whose turn it is; True if any is left."""
        if not self._prefilling:
            return False
        seat = self._prefilling.popleft()
        self._guard(seat.name, lambda: self._prefill_chunk(seat))
        return bool(self._prefilling)

    def next_deadline(self) -> float | None:
        """When the earliest wait for a block ends, in monotonic seconds."""
        waits = [seat.waiting.until for seat in self._seats.values() if seat.waiting is not None]
        return min(waits, default=None)

    def on_time(self, now: float) -> None:
        """Run one row for every round whose block did not come in time."""
        for seat in list(self._seats.values()):
            if seat.waiting is not None and seat.waiting.until <= now:
                self._counters["late_blocks"] += 1
                waited = seat.waited_ms(now)
                self._guard(seat.name, partial(self._run, seat, seat.waiting.order, (), waited))

    def heartbeat(self) -> tuple[str, int, Mapping[str, Scalar]]:
        """State, sessions held and counters."""
        return ("busy" if self._seats else "ready", len(self._seats), dict(self._counters))

    # ------------------------------------------------------------------ sessions

    def _open(self, order: Open) -> None:
        known = self._seats.get(order.session)
        if known is not None:
            # The coordinator asks again when an answer was lost: it gets the same ones.
            for answer in known.answers:
                self._send(CONTROL_PEER, answer)
            return
        if len(self._seats) >= self._capacity:
            raise Busy(f"target holds {self._capacity} sessions, its capacity; try again later")
        prompt = self._prompt_ids(order.prompt)
        self._check_length(len(prompt) - order.n_replayed, order.sampling.max_tokens)
        session = self._engine.open(order.sampling, taps=order.taps)
        text = Detokenizer(self._engine.tokenizer)
        for token in prompt[len(prompt) - order.n_replayed :]:
            text.push(token)
        seat = Seat(
            name=order.session,
            epoch=order.epoch,
            ticket=order.ticket,
            sampling=order.sampling,
            session=session,
            steps=session.prefill(prompt),
            text=text,
            stop_ids=frozenset(self._engine.card.eos_ids),
            n_generated=order.n_replayed,
        )
        self._seats[order.session] = seat
        self._prefilling.append(seat)
        self._answer(seat, Opened(order.session, order.epoch, from_ids(prompt)))

    def _answer(self, seat: Seat, answer: Opened | Prefilled) -> None:
        seat.answers.append(answer)
        self._send(CONTROL_PEER, answer)

    def _prompt_ids(self, prompt: Tensor) -> list[int]:
        """Token ids of a prompt; an empty one becomes the separator that starts a document."""
        ids = self._engine.encode(to_text(prompt)) if prompt.dtype == "uint8" else ids_of(prompt)
        vocab = self._engine.card.vocab_size
        for token in ids:
            if not 0 <= token < vocab:
                raise BadRequest(f"prompt id {token} is outside the vocabulary 0..{vocab - 1}")
        return ids or [self._engine.card.eos_ids[0]]

    def _check_length(self, n_prompt: int, max_tokens: int) -> None:
        limit = self._engine.card.context_len
        if n_prompt + max_tokens > limit:
            raise TooLong(
                f"prompt of {n_prompt} tokens plus max_tokens {max_tokens} is over the context of "
                f"{limit}; at most {max(0, limit - n_prompt)} fit after this prompt"
            )

    def _prefill_chunk(self, seat: Seat) -> None:
        start = time.perf_counter()
        step = next(seat.steps)
        self._links.push(seat, step.first_pos, step.features)
        self._send(CONTROL_PEER, PrefillProgress(seat.name, step.done, step.total))
        if step.anchor_id is None:
            self._prefilling.append(seat)
            return
        self._prefilled(seat, step, (time.perf_counter() - start) * 1e3)

    def _prefilled(self, seat: Seat, step: PrefillStep, ms: float) -> None:
        emission = seat.emit([seat.session.anchor_id])
        piece = emission.pieces[0] if emission.pieces else ""
        answer = Prefilled(
            session=seat.name,
            epoch=seat.epoch,
            anchor_id=seat.session.anchor_id,
            base=seat.session.base,
            piece=piece,
            finish=emission.finish,
            tail=emission.tail,
            near_ties=int(step.near_tie),
            ms=ms,
        )
        self._answer(seat, answer)

    def _close(self, name: str) -> None:
        seat = self._seats.pop(name, None)
        if seat is None:
            return
        if seat in self._prefilling:
            self._prefilling.remove(seat)
        seat.session.close()

    def _guard(self, name: str, action: Callable[[], None]) -> None:
        """Run `action`; a typed fault ends this session with an error and leaves the rest alone."""
        try:
            action()
        except DFlashError as fault:
            logger.warning("session %s failed: %s", name, fault)
            self._close(name)
            retry_after_s = fault.retry_after_s if isinstance(fault, Busy) else 0.0
            self._send(CONTROL_PEER, Failed(name, fault.code, fault.message, retry_after_s))

    # ------------------------------------------------------------------ rounds

    def _verify(self, order: Verify, now: float) -> None:
        seat = self._seats.get(order.key.session)
        if seat is None:
            # The coordinator must hear it: a silent drop would cost a whole progress budget.
            raise BadRequest(f"session {order.key.session!r} is not open at this target")
        stored = seat.stored_verdict(order.key)
        if stored is not None:
            self._send(CONTROL_PEER, stored)
            return
        if not seat.expects(order.key) or seat in self._prefilling:
            self._drop("stale_verify")
            return
        if order.copy_ids:
            self._run(seat, order, order.copy_ids)
        elif order.rows == 1 or order.key.draft_id == 0:
            self._run(seat, order, ())
        elif (block := seat.block_for(order)) is not None:
            self._run(seat, order, block.ids)
        else:
            seat.wait_for_block(order, now)

    def _block(self, peer: Peer, block: Block, now: float) -> None:
        seat = self._seats.get(block.key.session)
        if seat is None or seat.link != peer or not seat.take_block(block):
            self._drop("stale_block")
            return
        if seat.waiting is not None and seat.block_for(seat.waiting.order) is not None:
            self._run(seat, seat.waiting.order, block.ids, seat.waited_ms(now))

    def _run(
        self, seat: Seat, order: Verify, draft_ids: Sequence[int], waited_ms: float = 0.0
    ) -> None:
        drafts = self._usable(seat, draft_ids[: order.rows - 1])
        result = seat.session.verify(drafts, len(drafts) + 1)
        emission = seat.emit(result.ids)
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
        )
        seat.finish_round(verdict)
        self._counters["verifies"] += 1
        self._send(CONTROL_PEER, verdict)
        if not emission.finish:
            self._links.push(seat, result.first_pos, result.features)

    def _usable(self, seat: Seat, draft_ids: Sequence[int]) -> tuple[int, ...]:
        """The drafts, or none where one is outside the vocabulary: advice, so never an error."""
        vocab = self._engine.card.vocab_size
        if all(0 <= token < vocab for token in draft_ids):
            return tuple(draft_ids)
        self._links.lose(seat, f"draft ids {tuple(draft_ids)} leave the vocabulary 0..{vocab - 1}")
        return ()

    def _drop(self, what: str) -> None:
        self._counters[what] += 1
        logger.debug("dropped: %s", what)
