"""The requests that run or wait: which worker serves which, and carrying out what machines order.

Owns the running requests, their places at workers and the queue. Does not know registrations,
roles or how a message leaves: `post` takes it. Times are passed in.
Invariant: a session name leads to one request, and to the workers that hold it now.
"""

import math
from collections.abc import Callable, Iterable
from typing import assert_never

from common.coordinator.admission import Queue
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
    Placed,
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
from common.coordinator.registry import Registry, Worker
from common.coordinator.running import Running
from common.coordinator.tally import WHOLE, Tally
from common.coordinator.waits import Limits
from common.errors import Cancelled
from common.policy.copies import CopyFinder
from common.policy.policy import Adaptive, Fixed, Off, RoundPolicy
from common.settings import CoordinatorConfig, PolicyConfig
from common.wire.messages import LinkLost, Message
from common.wire.roles import DRAFTER, TARGET

Post = Callable[[str, Message], None]


class Requests:
    """All requests of the coordinator.

    Args:
        config: limits.
        policy: how rows are chosen.
        registry: the workers.
        tally: what is counted.
        new_ticket: makes an unguessable word for a data link.
        post: takes a message for a peer.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        policy: PolicyConfig,
        registry: Registry,
        tally: Tally,
        new_ticket: Callable[[], str],
        post: Post,
    ) -> None:
        self._policy = policy
        self._registry = registry
        self._tally = tally
        self._new_ticket = new_ticket
        self._post = post
        self._limits = Limits(
            prefill_s=config.prefill_budget_ms / 1e3,
            verify_s=config.verify_budget_ms / 1e3,
            max_replays=config.max_replays,
        )
        self._queue = Queue(config.max_queue)
        self._running: dict[int, Running] = {}
        self._sessions: dict[str, Running] = {}
        self._names: dict[tuple[str, str], Running] = {}
        self._stuck: list[tuple[Worker, str]] = []

    def __len__(self) -> int:
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        """Requests without a target."""
        return len(self._queue)

    def has(self, client: str, name: str) -> bool:
        """Whether a client's request runs or waits."""
        return (client, name) in self._names

    # ------------------------------------------------------------------ events

    def submit(self, request: Request, now: float) -> int:
        """Take a request in; `settle` places it.

        Returns:
            How many wait before it.

        Raises:
            Busy: the queue is full and no target has room; nothing changed.
        """
        n_before = 0
        is_placeable = not len(self._queue) and self._registry.pick(TARGET, now) is not None
        if is_placeable:
            self._queue.put_first(request.number)
        else:
            n_before = self._queue.put(request.number, request.client, self._registry.capacity())
        running = Running(RequestMachine(request, self._limits, self._new_ticket))
        self._running[request.number] = running
        self._names[request.client, request.name] = running
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

    def stop(self, client: str, name: str, now: float) -> None:
        """A client cancels one request; an unknown one is none any more."""
        running = self._names.get((client, name))
        if running is not None:
            self._feed(running, Stopped(Cancelled.code, f"request {name}: cancelled"), now)

    def client_lost(self, client: str, now: float) -> None:
        """Nobody will read the answers."""
        for running in self._of(lambda one: one.machine.request.client == client):
            self._feed(running, Stopped(Cancelled.code, "the client is gone"), now)

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
        return None if math.isinf(due) else due

    def on_time(self, now: float) -> None:
        """Look at every request whose time has come."""
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
        request = running.machine.request
        is_drafted = request.draft and self._policy.mode != "off"
        has_copies = is_drafted and target.copies and request.sampling.acceptance == "exact"
        has_taps = is_drafted and (target.hello.card is None or target.block_size >= 2)
        is_plain = not has_taps and not has_copies
        policy = Off(target.costs) if is_plain else self._policy_of(request, target)
        memory = CopyFinder() if has_copies else None
        own_block = target.block_size if target.drafts_itself else 0
        self._feed(running, Placed(policy, has_taps, own_block, memory), now)

    def _policy_of(self, request: Request, target: Worker) -> RoundPolicy:
        if self._policy.mode == "fixed" or target.costs is None:
            return Fixed()
        is_width_free = request.sampling.acceptance != "residual"
        return Adaptive(target.costs, is_width_free=is_width_free)

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
                self._post(running.machine.request.client, message)
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
        self._names.pop((request.client, request.name), None)
        self._queue.remove(request.number)
        if result in WHOLE:
            self._queue.finished(now - request.submitted_at)
        self._tally.request_ended(request, result, running.machine.reply)

    def _of(self, is_wanted: Callable[[Running], bool]) -> Iterable[Running]:
        return [running for running in self._running.values() if is_wanted(running)]


def _discard(worker: Worker | None, session: str) -> None:
    if worker is not None:
        worker.sessions.discard(session)
