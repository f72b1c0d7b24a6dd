"""The requests that run or wait: which worker serves which, and carrying out what machines order.

Owns the running requests, their places at workers and the queue. Does not know registrations,
roles or how a message leaves: `post` takes it, and `readers` what is for clients. Times are
passed in.
Invariant: a session name leads to one request, and to the workers that hold it now.
"""

import math
from collections.abc import Callable, Iterable
from typing import assert_never

from common.coordinator.admission import Queue
from common.coordinator.delivery import Delivery
from common.coordinator.events import (
    Command,
    DeadlineReached,
    DrafterAssigned,
    DrafterLost,
    DraftTook,
    Ended,
    Event,
    LeaveDrafter,
    LeaveTarget,
    Post,
    ReaderReady,
    Request,
    RoundDone,
    Stopped,
    StrikeDrafter,
    TargetLost,
    TargetStuck,
    ToClient,
    ToDrafter,
    ToTarget,
    WantTarget,
)
from common.coordinator.machine import RequestMachine
from common.coordinator.placing import placed
from common.coordinator.readers import Readers
from common.coordinator.registry import Registry, Worker
from common.coordinator.running import Running
from common.coordinator.tally import WHOLE, Tally
from common.coordinator.waits import Limits
from common.settings import CoordinatorConfig, PolicyConfig
from common.wire.messages import LinkLost, Message
from common.wire.roles import DRAFTER, TARGET


class Requests:
    """All requests of the coordinator.

    Args:
        config: limits.
        policy: how rows are chosen.
        registry: the workers.
        readers: who reads which reply.
        tally: what is counted.
        new_ticket: makes an unguessable word for a data link.
        post: takes a message for a peer.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        policy: PolicyConfig,
        registry: Registry,
        readers: Readers,
        tally: Tally,
        new_ticket: Callable[[], str],
        post: Post,
    ) -> None:
        self._policy = policy
        self._registry = registry
        self._readers = readers
        self._tally = tally
        self._new_ticket = new_ticket
        self._post = post
        self._limits = Limits(
            prefill_s=config.prefill_budget_ms / 1e3,
            verify_s=config.verify_budget_ms / 1e3,
            slow_reader_s=config.slow_reader_s,
            max_replays=config.max_replays,
        )
        self._queue = Queue(config.max_queue)
        self._running: dict[int, Running] = {}
        self._sessions: dict[str, Running] = {}
        self._stuck: list[tuple[Worker, str]] = []

    def __len__(self) -> int:
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        """Requests without a target."""
        return len(self._queue)

    # ------------------------------------------------------------------ events

    def get(self, number: int) -> Running | None:
        """A request that runs or waits."""
        return self._running.get(number)

    def submit(self, request: Request, delivery: Delivery) -> int:
        """Take a request in; `settle` places it.

        Returns:
            How many wait before it.

        Raises:
            Busy: the queue is full and no target has room; nothing changed.
        """
        n_before = 0
        is_placeable = (
            not len(self._queue) and self._registry.pick(TARGET, request.submitted_at) is not None
        )
        if is_placeable:
            self._queue.put_first(request.number)
        else:
            n_before = self._queue.put(request.number, request.client, self._registry.capacity())
        machine = RequestMachine(request, self._limits, self._new_ticket)
        self._running[request.number] = Running(machine, delivery, request.expires_at)
        return n_before

    def on_session(self, worker: Worker, session: str, event: Event, now: float) -> bool:
        """Pass a worker's word on to its request; False: the worker does not hold this session."""
        running = self._sessions.get(session)
        if running is None or not running.holds(worker):
            return False
        n_stale = running.machine.n_stale
        self._feed(running, event, now)
        if running.machine.n_stale > n_stale:
            self._tally.stale()
        return True

    def on_link_lost(self, worker: Worker, message: LinkLost, now: float) -> None:
        """A data link is gone; what names an old ticket is dropped."""
        running = self._sessions.get(message.session)
        if running is None or not running.holds(worker):
            return
        if running.machine.attachment.ticket == message.ticket:
            retry_s = running.machine.attachment.retry_s()
            self._feed(running, DrafterLost(message.reason, retry_s), now)

    def stop(self, number: int, code: str, message: str, now: float) -> None:
        """End one request; one that has ended is none any more."""
        running = self._running.get(number)
        if running is not None:
            self._feed(running, Stopped(code, message), now)

    def go_on(self, number: int, now: float) -> None:
        """Let a request that waits for its reader go on, if that is behind no more."""
        running = self._running.get(number)
        if running is not None and running.is_pause_over:
            self._feed(running, ReaderReady(), now)

    def stop_all(self, code: str, message: str, now: float) -> None:
        """End everything."""
        for running in self._of(lambda _: True):
            self._feed(running, Stopped(code, message), now)

    def worker_lost(self, worker: Worker, reason: str, now: float) -> None:
        """A worker is no longer registered."""
        for running in self._of(lambda one: one.drafter is worker):
            self._feed(running, DrafterLost(reason), now)
        can_replay = self._registry.may_serve(now)
        for running in self._of(lambda one: one.target is worker):
            event = TargetLost(f"{worker.name}: {reason}", can_replay)
            self._feed(running, event, now)

    def leave_drafter(self, worker: Worker, now: float) -> None:
        """A drafter takes nothing more: its sessions go on with another one, or without."""
        for running in self._of(lambda one: one.drafter is worker):
            self._feed(running, DrafterLost("draining"), now)

    # ------------------------------------------------------------------ time

    def next_deadline(self) -> float | None:
        """When `on_time` is wanted, in monotonic seconds."""
        due = min((running.due for running in self._running.values()), default=math.inf)
        kept_until = self._readers.next_deadline()
        due = due if kept_until is None else min(due, kept_until)
        return None if math.isinf(due) else due

    def on_time(self, now: float) -> None:
        """Look at every request, and every kept reply, whose time has come."""
        self._readers.on_time(now)
        for running in self._of(lambda one: now >= one.expires_at):
            self._feed(running, running.expired(now), now)
        for running in self._of(lambda one: now >= one.due):
            self._feed(running, DeadlineReached(), now)

    def take_stuck(self) -> list[tuple[Worker, str]]:
        """Targets that a request found stuck since the last call, with the reason."""
        found, self._stuck = self._stuck, []
        return found

    # ------------------------------------------------------------------ places

    def settle(self, now: float) -> None:
        """Give free places to those who want them."""
        while len(self._queue):
            target = self._registry.pick(TARGET, now)
            if target is None:
                break
            number = self._queue.take()
            if number is not None:
                self._place(self._running[number], target, now)
        for running in self._of(lambda one: one.machine.wants_drafter(now)):
            drafter = self._registry.pick(DRAFTER, now)
            if drafter is None:
                break
            self._assign(running, drafter, now)

    def _place(self, running: Running, target: Worker, now: float) -> None:
        running.target = target
        self._feed(running, placed(self._policy, running.machine.request, target), now)

    def _assign(self, running: Running, drafter: Worker, now: float) -> None:
        target = running.target
        block_size = drafter.block_size or (target.block_size if target else 0)
        if target is None or target.ready is None or block_size < 2:
            return
        running.drafter = drafter
        drafter.sessions.add(running.machine.session)
        endpoint, key = target.ready.data_endpoint, target.ready.data_public_key
        self._feed(running, DrafterAssigned(endpoint, key, block_size), now)

    # ------------------------------------------------------------------ commands

    def _feed(self, running: Running, event: Event, now: float) -> None:
        before = running.machine.session
        commands = running.machine.handle(event, now, running.scene(self._registry, now))
        session = running.machine.session
        if session != before and session and running.target is not None:
            self._sessions[session] = running
            running.target.sessions.add(session)
        for command in commands:
            self._execute(running, command, before or session, now)

    def _execute(self, running: Running, command: Command, session: str, now: float) -> None:
        match command:
            case ToTarget(message):
                self._post_to(running.target, message)
            case ToDrafter(message):
                self._post_to(running.who_drafts, message)
            case ToClient(message):
                self._readers.take(running.delivery, message)
            case LeaveDrafter():
                _discard(running.drafter, session)
                running.drafter = None
            case LeaveTarget():
                _discard(running.target, session)
                self._sessions.pop(session, None)
                running.target = None
            case DraftTook(ms):
                if running.drafter is not None:
                    self._registry.draft_took(running.drafter, ms, is_in_time=True)
            case StrikeDrafter(reason):
                if running.drafter is not None:
                    self._registry.strike(running.drafter, reason, now)
            case TargetStuck(reason):
                if running.target is not None:
                    self._stuck.append((running.target, reason))
            case WantTarget():
                self._queue.put_first(running.machine.request.number)
            case RoundDone():
                self._tally.round_done(command)
            case Ended(result):
                self._end(running, result, now)
            case _:
                assert_never(command)

    def _post_to(self, worker: Worker | None, message: Message) -> None:
        if worker is not None:
            self._post(worker.peer, message)

    def _end(self, running: Running, result: str, now: float) -> None:
        request = running.machine.request
        self._running.pop(request.number, None)
        self._readers.end(running.delivery, now)
        self._queue.remove(request.number)
        if result in WHOLE:
            self._queue.finished(now - request.submitted_at)
        self._tally.request_ended(request, result, running.machine.reply)

    def _of(self, is_wanted: Callable[[Running], bool]) -> Iterable[Running]:
        return [running for running in self._running.values() if is_wanted(running)]


def _discard(worker: Worker | None, session: str) -> None:
    if worker is not None:
        worker.sessions.discard(session)
