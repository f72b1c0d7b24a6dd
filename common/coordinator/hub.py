"""The coordinator without sockets or clock: messages and times in, messages out.

Owns peers and their roles, registration, liveness and what clients ask. Does not know bytes,
threads or real time; `service` is the shell around it, the in-process mesh another.
Invariant: whatever a peer sends, nothing is raised; what does not fit is dropped and counted.
"""

import logging
from collections.abc import Callable
from typing import Final, NamedTuple

from common.coordinator.clients import Clients
from common.coordinator.entrance import WORKER_ROLES, check_hello
from common.coordinator.readers import Readers
from common.coordinator.registry import Registry
from common.coordinator.report import status_body
from common.coordinator.requests import Requests
from common.coordinator.tally import Tally
from common.coordinator.workers import Workers
from common.errors import AuthRefused, BadRequest, DFlashError, NotReady, PeerLost, WireError
from common.metrics import Metrics
from common.net.liveness import ALIVE
from common.settings import CoordinatorConfig, PolicyConfig
from common.wire.messages import (
    Bye,
    Cancel,
    Drain,
    Hello,
    Message,
    Read,
    Reject,
    Status,
    StatusRequest,
    Submit,
    Welcome,
    WorkerExited,
)
from common.wire.roles import CONTROL, DRAFTER, check_sender

logger = logging.getLogger(__name__)

LOGGED_BAD: Final = 20  # bad messages that are logged one by one; a flood must not fill the disk
EVERY_BAD: Final = 1000  # after that, one in so many


class Outgoing(NamedTuple):
    """A message for a peer."""

    peer: str
    message: Message


class Coordinator:
    """Decides; driven by `handle`, `lost`, `tick`.

    Args:
        config: limits and clocks.
        policy: how rows are chosen.
        new_word: makes unguessable words, for tickets and registrations.
        metrics: what is counted; None: its own.

    Attributes:
        is_draining: nothing new is let in.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        policy: PolicyConfig,
        new_word: Callable[[], str],
        metrics: Metrics | None = None,
    ) -> None:
        self.metrics = metrics or Metrics()
        self.is_draining = False
        heartbeat_s = config.heartbeat_ms / 1e3
        self._heartbeat_ms = config.heartbeat_ms
        self._new_word = new_word
        self._out: list[Outgoing] = []
        self._roles: dict[str, str] = {}  # of every peer that said Hello
        self._n_bad = 0
        self._tally = Tally(self.metrics)
        self.registry = Registry(
            silence_s=heartbeat_s * config.lost_after,
            budget_s=max(config.prefill_budget_ms, config.verify_budget_ms) / 1e3,
            draft_deadline_s=config.draft_deadline_ms / 1e3,
        )
        self.readers = Readers(config.resume_s, self._send)
        self.requests = Requests(
            config, policy, self.registry, self.readers, self._tally, new_word, self._send
        )
        self._clients = Clients(self.requests, self.readers, self._tally, self._send)
        self._workers = Workers(
            self.registry,
            self.requests,
            self.metrics,
            self._tally,
            self._send,
            self._lose,
            heartbeat_s,
        )

    # ------------------------------------------------------------------ what the shell calls

    def handle(
        self, peer: str, message: Message, now: float, key_role: str | None = None, key: str = ""
    ) -> list[Outgoing]:
        """Take one message.

        Args:
            peer: who sent it.
            message: checked by the codec.
            now: monotonic seconds.
            key_role: role of the sender's key; None where links have no keys.
            key: whose key it is; "" where links have none.
        """
        try:
            self._take(peer, message, now, key_role, key)
        except DFlashError as fault:
            self._bad(peer, type(message).__name__, fault, now)
        return self._settled(now)

    def bad(self, peer: str, fault: WireError, now: float) -> list[Outgoing]:
        """A peer sent bytes that are no message."""
        self._bad(peer, "bytes", fault, now)
        return self._settled(now)

    def lost(self, peer: str, now: float) -> list[Outgoing]:
        """A peer's connection is gone."""
        self._lose(peer, "connection lost", now)
        return self._settled(now)

    def next_deadline(self) -> float | None:
        """When `tick` is wanted, in monotonic seconds."""
        moments = [
            self._workers.next_beat,
            self.registry.next_deadline(),
            self.requests.next_deadline(),
        ]
        return min((moment for moment in moments if moment is not None), default=None)

    def tick(self, now: float) -> list[Outgoing]:
        """Look at everything that waits for time."""
        for worker in self.registry:
            verdict = self.registry.verdict(worker, now)
            if verdict != ALIVE:
                self._lose(worker.peer, verdict, now)
        self.requests.on_time(now)
        self._workers.beat(now)
        return self._settled(now)

    def close(self, reason: str, now: float) -> list[Outgoing]:
        """End every request and say goodbye to everybody."""
        self.is_draining = True
        self.requests.stop_all(PeerLost.code, f"the coordinator ends: {reason}", now)
        for peer in list(self._roles):
            self._send(peer, Bye(reason))
        return self._settled(now)

    # ------------------------------------------------------------------ peers

    def _take(
        self, peer: str, message: Message, now: float, key_role: str | None, key: str
    ) -> None:
        if isinstance(message, Hello):
            self._hello(peer, message, now, key_role)
            return
        role = self._roles.get(peer)
        if role is None:
            if not isinstance(message, Bye):
                text = f"{type(message).__name__} before Hello; say Hello first"
                logger.debug("%s: %s", peer, text)
                self._send(peer, Reject(NotReady.code, text))
            return
        if key_role is not None and key_role != role:
            raise AuthRefused(f"key of {peer}: its role is {key_role!r} now, not {role!r}")
        check_sender(CONTROL, role, message)
        worker = self.registry.get(peer)
        if worker is not None:
            worker.liveness.heard(now)
            self._workers.take(worker, message, now)
        else:
            self._from_client(peer, message, now, key)

    def _hello(self, peer: str, hello: Hello, now: float, key_role: str | None) -> None:
        try:
            check_hello(hello, key_role)
            if hello.role in WORKER_ROLES:
                self._register(peer, hello, now)
            elif self.registry.get(peer) is not None:
                raise BadRequest(f"{hello.name} was a worker on this connection; open a new one")
        except DFlashError as fault:
            logger.warning("%s refused: %s", hello.name, fault)
            self._send(peer, Reject(fault.code, fault.message))
            return
        self._roles[peer] = hello.role
        self._send(peer, Welcome(self._new_word(), self._heartbeat_ms))

    def _register(self, peer: str, hello: Hello, now: float) -> None:
        """Register a worker; whoever had its name, or spoke on its connection, is gone.

        A worker that is still loading says Hello twice, the second time with its card.
        """
        for former in (self.registry.named(hello.name), self.registry.get(peer)):
            if former is not None and (former.peer != peer or former.ready is not None):
                self._lose(former.peer, "registered again", now)
        self.registry.register(peer, hello, now)
        self._workers.beat(now)

    def _lose(self, peer: str, reason: str, now: float) -> None:
        role = self._roles.pop(peer, None)
        worker = self.registry.get(peer)
        if worker is not None:
            logger.info("%s is gone: %s", worker.name, reason)
            self.registry.remove(worker)
            self.metrics.gauge("dflash_worker_up", 0, worker=worker.name)
            self.requests.worker_lost(worker, reason, now)
        elif role is not None:
            self._clients.lost(peer, now)

    def _bad(self, peer: str, kind: str, fault: DFlashError, now: float) -> None:
        role = self._roles.get(peer, "unknown")
        self.metrics.count("dflash_bad_messages", peer=role, kind=kind)
        self._n_bad += 1
        if self._n_bad <= LOGGED_BAD or self._n_bad % EVERY_BAD == 0:
            logger.warning("dropped %s from %s (%d so far): %s", kind, role, self._n_bad, fault)
        worker = self.registry.get(peer)
        if worker is not None and worker.role == DRAFTER:
            self.registry.strike(worker, f"bad {kind}", now)

    # ------------------------------------------------------------------ clients

    def _from_client(self, peer: str, message: Message, now: float, key: str) -> None:
        match message:
            case Submit():
                self._clients.submit(peer, message, now, key, is_draining=self.is_draining)
            case Read():
                self._clients.read(peer, message, now)
            case Cancel():
                self._clients.cancel(peer, message.request, now)
            case StatusRequest():
                self._send(peer, Status(message.request, self._status(now)))
            case Drain():
                self._workers.drain(peer, message.name, now)
            case WorkerExited():
                worker = self.registry.named(message.name)
                if worker is not None:
                    self._lose(worker.peer, f"process ended: {message.reason}", now)
            case Bye():
                self._lose(peer, f"goodbye: {message.reason}", now)
            case _:
                raise BadRequest(f"{type(message).__name__} from a client; not expected here")

    def _status(self, now: float) -> str:
        """The body of a Status."""
        ended = self._tally.ended
        return status_body(self.registry, self.requests, ended, now, is_draining=self.is_draining)

    # ------------------------------------------------------------------ the end of each call

    def _settled(self, now: float) -> list[Outgoing]:
        self.requests.settle(now)
        for worker, reason in self.requests.take_stuck():
            self._lose(worker.peer, f"stuck: {reason}", now)
            self.requests.settle(now)
        self._workers.finish_drains(now)
        self.metrics.gauge("dflash_queue_depth", self.requests.n_waiting)
        self.metrics.gauge("dflash_kept_replies", len(self.readers))
        out, self._out = self._out, []
        return out

    def _send(self, peer: str, message: Message) -> None:
        self._out.append(Outgoing(peer, message))
