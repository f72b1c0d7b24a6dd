"""The drafter as an actor: messages in, context appends and drafts, messages out.

Owns the seats (one context per session), the Draft held until its context is complete, and the
links to targets. Does not know sockets, threads, the policy or how a block is drafted. Runs on the
compute thread.

Invariant: a block is drafted only when the context ends exactly at the anchor's position; rows
below the end are ignored, a gap asks for the missing rows again.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common.errors import DFlashError
from common.net.transport import CONTROL_PEER, Peer, Send
from common.wire.messages import (
    Attach,
    Block,
    Close,
    Draft,
    Drafted,
    DraftFailed,
    Features,
    Link,
    LinkLost,
    LinkRefused,
    Message,
    Resync,
    RoundKey,
    Scalar,
)
from drafter_svc.context import Context, ContextGap
from drafter_svc.drafter import DraftBlock, Drafter, DraftJob
from drafter_svc.draws import Drawing
from drafter_svc.frames import rows_of

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Seat:
    """One session at the drafter."""

    attach: Attach
    target: Peer
    context: Context
    has_rows: bool  # the context holds rows of this session
    asked_from: int = -1  # position of the last Resync not yet answered, else -1
    held: Draft | None = None  # waits for its context
    held_until: float = 0.0


class DrafterService:
    """Actor of the drafter process.

    Args:
        drafter: loaded and warmed up.
        send: hands a message to the I/O thread; False when the peer is gone.
        dial: opens, or reuses, the data link to a target: endpoint and server key to peer;
            what is sent meanwhile waits until the link stands.
    """

    def __init__(self, drafter: Drafter, send: Send, dial: Callable[[str, str], Peer]) -> None:
        self._drafter = drafter
        self._send = send
        self._dial = dial
        self._seats: dict[str, Seat] = {}
        self._ready: deque[str] = deque()  # sessions whose held Draft may have its context
        self._counters: Counter[str] = Counter(drafts=0)

    # ------------------------------------------------------------------ the actor's face

    def on_message(self, peer: Peer, message: Message, now: float) -> None:
        """Handle one message; a fault costs a draft, never the process."""
        match message:
            case Attach():
                self._attach(message)
            case Draft():
                self._draft(message, now)
            case Features():
                self._features(peer, message)
            case LinkRefused():
                self._refused(message)
            case Close():
                self._seats.pop(message.session, None)
            case _:
                self._drop("unexpected_" + type(message).__name__.lower())

    def on_lost(self, peer: Peer, now: float) -> None:
        """Drop the sessions of a lost connection; without the coordinator, all of them."""
        if peer == CONTROL_PEER:
            self._seats.clear()
            return
        for name, seat in list(self._seats.items()):
            if seat.target == peer:
                self._lose(name, "connection lost")

    def work(self, now: float) -> bool:
        """Draft for those whose context is complete, together; True: some are left."""
        self._draft_ready()
        return bool(self._ready)

    def next_deadline(self) -> float | None:
        """When the earliest held draft gives up, in monotonic seconds."""
        held = [seat.held_until for seat in self._seats.values() if seat.held is not None]
        return min(held, default=None)

    def on_time(self, now: float) -> None:
        """Give up held drafts whose deadline passed."""
        for seat in self._seats.values():
            if seat.held is not None and seat.held_until <= now:
                key, seat.held = seat.held.key, None
                self._fail(key, "no_context")

    def heartbeat(self) -> tuple[str, int, Mapping[str, Scalar]]:
        """State, sessions held and counters."""
        return ("busy" if self._seats else "ready", len(self._seats), dict(self._counters))

    # ------------------------------------------------------------------ sessions and links

    def _attach(self, order: Attach) -> None:
        known = self._seats.get(order.session)
        if known is not None and known.attach.epoch == order.epoch:
            # A new link, the same history: only what is missing is fed.
            context, has_rows = known.context, known.has_rows
        else:
            context = self._drafter.open(order.session, self._drafter.card.context_len)
            has_rows = False
        target = self._dial(order.endpoint, order.server_key)
        self._seats[order.session] = Seat(order, target, context, has_rows)
        if not self._send(target, Link(order.session, order.epoch, order.ticket, context.end)):
            self._lose(order.session, f"no link to {order.endpoint}")

    def _refused(self, answer: LinkRefused) -> None:
        seat = self._seats.get(answer.session)
        if seat is not None and seat.attach.ticket == answer.ticket:
            self._lose(answer.session, f"refused by the target: {answer.reason}")

    def _lose(self, name: str, reason: str) -> None:
        seat = self._seats.pop(name)
        if seat.held is not None:
            self._fail(seat.held.key, "unknown_session")
        self._send(CONTROL_PEER, LinkLost(name, seat.attach.ticket, reason))

    # ------------------------------------------------------------------ features

    def _features(self, peer: Peer, message: Features) -> None:
        seat = self._seats.get(message.session)
        if seat is None or seat.target != peer or seat.attach.epoch != message.epoch:
            self._drop("stale_features")
            return
        try:
            self._append(seat, message)
        except ContextGap as gap:
            self._counters["gaps"] += 1
            seat.asked_from = gap.wanted_pos
            self._send(peer, Resync(message.session, message.epoch, gap.wanted_pos))
            return
        except DFlashError as fault:
            logger.warning("session %s: %s", message.session, fault)
            self._lose(message.session, fault.message)
            return
        self._try_held(seat)

    def _append(self, seat: Seat, message: Features) -> None:
        starts_late = not seat.has_rows or seat.asked_from == seat.context.end
        if starts_late and message.first_pos > seat.context.end:
            # The target keeps no older rows than these: a start after a prefix.
            seat.context.reset(message.first_pos)
        self._drafter.append(seat.context, rows_of(message.rows), message.first_pos)
        seat.has_rows = True
        seat.asked_from = -1

    # ------------------------------------------------------------------ drafts

    def _draft(self, order: Draft, now: float) -> None:
        seat = self._seats.get(order.key.session)
        if seat is None:
            self._fail(order.key, "unknown_session")
        elif seat.attach.epoch != order.key.epoch or seat.context.end > order.key.base:
            self._fail(order.key, "stale")
        else:
            seat.held = order
            seat.held_until = now + order.deadline_ms / 1e3
            self._try_held(seat)

    def _try_held(self, seat: Seat) -> None:
        """Draft with the others that are ready once the messages at hand are taken."""
        if seat.held is not None and seat.context.end >= seat.held.key.base:
            self._ready.append(seat.held.key.session)

    def _draft_ready(self) -> None:
        """One forward for the sessions that are ready, in the order in which they became so."""
        jobs: dict[str, tuple[Seat, Draft]] = {}
        while self._ready and len(jobs) < self._drafter.most_together:
            name = self._ready.popleft()
            seat = self._seats.get(name)
            if seat is None or seat.held is None or seat.context.end < seat.held.key.base:
                continue  # closed, given up or made anew meanwhile
            order, seat.held = seat.held, None
            if seat.context.end > order.key.base:
                self._fail(order.key, "stale")
            else:
                jobs[name] = seat, order
        if jobs:
            self._draft_together(list(jobs.values()))

    def _draft_together(self, jobs: list[tuple[Seat, Draft]]) -> None:
        start = time.perf_counter()
        blocks = self._drafter.draft_all(
            [
                DraftJob(seat.context, order.key.anchor_id, order.n_drafts, _drawing_of(order))
                for seat, order in jobs
            ]
        )
        ms = (time.perf_counter() - start) * 1e3
        self._counters["drafted_together"] += len(jobs) if len(jobs) > 1 else 0
        for (seat, order), block in zip(jobs, blocks, strict=True):
            if isinstance(block, DFlashError):
                logger.warning("session %s: %s", order.key.session, block)
                self._fail(order.key, "fault")
            else:
                self._hand_over(seat, order, block, ms)

    def _hand_over(self, seat: Seat, order: Draft, block: DraftBlock, ms: float) -> None:
        # The coordinator first: what it decides travels while the block does. Should the block not
        # leave, the target waits for it until its deadline and runs one row.
        self._counters["drafts"] += 1
        self._send(CONTROL_PEER, Drafted(order.key, block.confidences, ms))
        shares = block.q_ids, block.q_probs
        sent = Block(order.key, block.draft_ids, block.confidences, *shares)
        if not self._send(seat.target, sent):
            self._lose(order.key.session, "block could not be sent")

    def _fail(self, key: RoundKey, reason: str) -> None:
        self._counters["failed_" + reason] += 1
        self._send(CONTROL_PEER, DraftFailed(key, reason))

    def _drop(self, what: str) -> None:
        self._counters[what] += 1
        logger.debug("dropped: %s", what)


def _drawing_of(order: Draft) -> Drawing | None:
    """How the drafts of an order are to be drawn; None: the best ones are taken."""
    if order.temperature <= 0:
        return None
    return Drawing(order.temperature, order.seed, order.key.base)
