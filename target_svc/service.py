"""The target as an actor: messages in, session calls, messages out.

Owns the seats and the order of prefill chunks. Does not know sockets, threads, the policy, rounds
or how a verify works. Runs on the compute thread.

Invariant: a message that does not match its seat is dropped and counted, and a fault of one session
never reaches another.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial

from common.errors import BadRequest, Busy, DFlashError, TooLong
from common.net.transport import CONTROL_PEER, Peer, Send
from common.wire.messages import (
    Block,
    Close,
    Draft,
    DraftFailed,
    Failed,
    Link,
    Message,
    Open,
    Opened,
    Prefilled,
    PrefillProgress,
    Renew,
    Resync,
    Sampling,
    Scalar,
    Verify,
)
from common.wire.tensors import from_ids
from target_svc.engine import Engine
from target_svc.frames import logprob_fields
from target_svc.host_reads import HostReads
from target_svc.links import FeatureLinks
from target_svc.models.family import host_counters
from target_svc.prefill import PrefillStep
from target_svc.rounds import Rounds
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
        self._rounds = Rounds(engine, send, self._links, self._prefilling, self._counters)

    # ------------------------------------------------------------------ the actor's face

    def on_message(self, peer: Peer, message: Message, now: float) -> None:
        """Handle one message; a fault of one session never reaches another."""
        match message:
            case Open():
                self._guard(message.session, lambda: self._open(message))
            case Draft():
                self._guard(message.key.session, lambda: self._draft(message))
            case Verify():
                self._guard(message.key.session, lambda: self._verify(message, now))
            case Block():
                seat = self._seats.get(message.key.session)
                self._guard(
                    message.key.session, lambda: self._rounds.block(peer, seat, message, now)
                )
            case Link():
                self._links.link(peer, message, self._seats.get(message.session))
            case Resync():
                self._links.resync(peer, message, self._seats.get(message.session))
            case Renew():
                self._links.renew(message, self._seats.get(message.session))
            case Close():
                self._close(message.session)
            case _:
                self._counters["unexpected_" + type(message).__name__.lower()] += 1

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
        """Run one prefill chunk of the session whose turn it is, or build ahead; True: go on."""
        if not self._prefilling:
            return self._rounds.prepare(self._seats.values())
        seat = self._prefilling.popleft()
        if seat.retry is None:
            self._guard(seat.name, lambda: self._prefill_chunk(seat))
        else:
            self._guard(seat.name, partial(self._rounds.resume, seat, seat.retry))
        return True

    def next_deadline(self) -> float | None:
        """When the earliest wait for a block ends, in monotonic seconds."""
        waits = [seat.waiting.until for seat in self._seats.values() if seat.waiting is not None]
        return min(waits, default=None)

    def on_time(self, now: float) -> None:
        """Run one row for every round whose block did not come in time."""
        for seat in list(self._seats.values()):
            if seat.waiting is not None and seat.waiting.until <= now:
                self._guard(seat.name, partial(self._rounds.give_up_waiting, seat, now))

    def heartbeat(self) -> tuple[str, int, Mapping[str, Scalar]]:
        """State, sessions held and counters."""
        engine = self._engine
        counters = {
            **self._counters,
            **host_counters(engine.model),
            **engine.prefixes.counters(),
        }
        return ("busy" if self._seats else "ready", len(self._seats), counters)

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
        prompt = self._engine.prompts.ids_of(order)
        n_prompt = len(prompt) - order.n_replayed
        self._check_length(n_prompt, order.sampling.max_tokens)
        self._check_sampling(order.sampling)
        session = self._engine.open(order.sampling, taps=order.taps, owner=order.share_scope)
        seat = Seat(
            name=order.session,
            epoch=order.epoch,
            ticket=order.ticket,
            sampling=order.sampling,
            session=session,
            reads=HostReads(self._engine.model),
            steps=session.prefill(prompt, order.n_replayed),
            text=Detokenizer(self._engine.tokenizer),
            stop_ids=frozenset(self._engine.card.eos_ids),
        )
        seat.replay(prompt[n_prompt:])
        self._seats[order.session] = seat
        self._prefilling.append(seat)
        self._answer(seat, Opened(order.session, order.epoch, from_ids(prompt)))

    def _answer(self, seat: Seat, answer: Opened | Prefilled) -> None:
        seat.answers.append(answer)
        self._send(CONTROL_PEER, answer)

    def _check_sampling(self, sampling: Sampling) -> None:
        vocab = self._engine.card.vocab_size
        for name, ids in (("bias_ids", sampling.bias_ids), ("stop_ids", sampling.stop_ids)):
            for token in ids:
                if token >= vocab:
                    raise BadRequest(f"{name}: {token} is outside the vocabulary 0..{vocab - 1}")

    def _check_length(self, n_prompt: int, max_tokens: int) -> None:
        limit = self._engine.card.context_len
        if n_prompt + max_tokens > limit:
            raise TooLong(
                f"prompt of {n_prompt} tokens plus max_tokens {max_tokens} is over the context of "
                f"{limit}; at most {max(0, limit - n_prompt)} fit after this prompt"
            )

    def _prefill_chunk(self, seat: Seat) -> None:
        start = time.perf_counter()
        with seat.reads.counted():
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
        reads = seat.reads.take()
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
            **logprob_fields(step.logprobs[: len(emission.ids)]),
            ngram_hits=reads.hits,
            ngram_misses=reads.misses,
            cached_tokens=seat.session.n_cached,
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

    def _draft(self, order: Draft) -> None:
        seat = self._seats.get(order.key.session)
        if seat is None:
            self._send(CONTROL_PEER, DraftFailed(order.key, "unknown_session"))
        else:
            self._rounds.draft(seat, order)

    def _verify(self, order: Verify, now: float) -> None:
        seat = self._seats.get(order.key.session)
        if seat is None:
            # The coordinator must hear it: a silent drop would cost a whole progress budget.
            raise BadRequest(f"session {order.key.session!r} is not open at this target")
        self._rounds.verify(seat, order, now)
