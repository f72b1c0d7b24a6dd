"""The coordinator without sockets or clock: messages and times in, messages out.

Owns peers and their roles, registration, draining, liveness and the answer to `Status`. Does not
know bytes, threads or real time; `service` is the shell around it, the in-process mesh another.
Invariant: whatever a peer sends, nothing is raised; what does not fit is dropped and counted.
"""

import logging
from collections.abc import Callable
from typing import Final, NamedTuple

from common.config import CoordinatorConfig, PolicyConfig
from common.coordinator.events import Request
from common.coordinator.registry import Registry, Worker, is_worker
from common.coordinator.report import status_body
from common.coordinator.requests import Requests
from common.errors import (
    AuthRefused,
    BadRequest,
    Busy,
    DFlashError,
    NotReady,
    PeerLost,
    WireError,
)
from common.metrics import Metrics
from common.net.liveness import ALIVE
from common.sampling import SamplingParams
from common.wire.messages import (
    Accepted,
    Bye,
    Cancel,
    Drafted,
    DraftFailed,
    Drain,
    Drained,
    Failed,
    Heartbeat,
    Hello,
    LinkLost,
    Message,
    Opened,
    Prefilled,
    PrefillProgress,
    Progress,
    Ready,
    Reject,
    Status,
    StatusRequest,
    Submit,
    Verified,
    Welcome,
    WorkerExited,
)
from common.wire.messages import Close as CloseSession
from common.wire.roles import ADMIN, CLIENT, CONTROL, check_sender
from common.wire.tensors import to_ids, to_text
from common.wire.version import check_version

logger = logging.getLogger(__name__)

CLIENT_ROLES: Final = (CLIENT, ADMIN)


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
        self._heartbeat_s = config.heartbeat_ms / 1e3
        self._new_word = new_word
        self._out: list[Outgoing] = []
        self._roles: dict[str, str] = {}  # of every peer that said Hello
        self._drains: dict[str, list[str]] = {}  # worker name -> admins that wait for Drained
        self._n_requests = 0
        self._next_beat: float | None = None
        self.registry = Registry(
            silence_s=self._heartbeat_s * config.lost_after,
            budget_s=max(config.prefill_budget_ms, config.verify_budget_ms) / 1e3,
            draft_deadline_s=config.draft_deadline_ms / 1e3,
        )
        self.requests = Requests(config, policy, self.registry, self.metrics, new_word, self._send)

    # ------------------------------------------------------------------ what the shell calls

    def handle(
        self, peer: str, message: Message, now: float, key_role: str | None = None
    ) -> list[Outgoing]:
        """Take one message.

        Args:
            peer: who sent it.
            message: checked by the codec.
            now: monotonic seconds.
            key_role: role of the sender's key; None where links have no keys.
        """
        try:
            self._take(peer, message, now, key_role)
        except DFlashError as fault:
            self._bad(peer, type(message).__name__, fault)
        return self._settled(now)

    def bad(self, peer: str, fault: WireError, now: float) -> list[Outgoing]:
        """A peer sent bytes that are no message."""
        self._bad(peer, "bytes", fault)
        return self._settled(now)

    def lost(self, peer: str, now: float) -> list[Outgoing]:
        """A peer's connection is gone."""
        self._lose(peer, "connection lost", now)
        return self._settled(now)

    def next_deadline(self) -> float | None:
        """When `tick` is wanted, in monotonic seconds."""
        moments = [self._next_beat, self.registry.next_deadline(), self.requests.next_deadline()]
        return min((moment for moment in moments if moment is not None), default=None)

    def tick(self, now: float) -> list[Outgoing]:
        """Look at everything that waits for time."""
        for worker in self.registry:
            verdict = self.registry.verdict(worker, now)
            if verdict != ALIVE:
                self._lose(worker.peer, verdict, now)
        self.requests.on_time(now)
        self._beat(now)
        return self._settled(now)

    def close(self, reason: str, now: float) -> list[Outgoing]:
        """End every request and say goodbye to everybody."""
        self.is_draining = True
        self.requests.stop_all(PeerLost.code, f"the coordinator ends: {reason}", now)
        for peer in list(self._roles):
            self._send(peer, Bye(reason))
        return self._settled(now)

    # ------------------------------------------------------------------ messages

    def _take(self, peer: str, message: Message, now: float, key_role: str | None) -> None:
        if isinstance(message, Hello):
            self._hello(peer, message, now, key_role)
            return
        role = self._roles.get(peer)
        if role is None:
            if not isinstance(message, Bye):
                text = f"{type(message).__name__} before Hello; say Hello first"
                self._send(peer, Reject(NotReady.code, text))
            return
        if key_role is not None and key_role != role:
            raise AuthRefused(f"key of {peer}: its role is {key_role!r} now, not {role!r}")
        check_sender(CONTROL, role, message)
        worker = self.registry.get(peer)
        if worker is not None:
            worker.liveness.heard(now)
            self._from_worker(worker, message, now)
        else:
            self._from_client(peer, message, now)

    def _hello(self, peer: str, hello: Hello, now: float, key_role: str | None) -> None:
        try:
            check_version(hello.name, hello.major, hello.minor)
            self._check_role(hello, key_role)
            if is_worker(hello.role):
                self._replace(peer, hello, now)
        except DFlashError as fault:
            logger.warning("%s refused: %s", hello.name, fault)
            self._send(peer, Reject(fault.code, fault.message))
            return
        self._roles[peer] = hello.role
        self._send(peer, Welcome(self._new_word(), round(self._heartbeat_s * 1e3)))

    def _check_role(self, hello: Hello, key_role: str | None) -> None:
        if not is_worker(hello.role) and hello.role not in CLIENT_ROLES:
            raise BadRequest(f"role {hello.role!r}; it must be target, drafter, client or admin")
        if key_role is not None and key_role != hello.role:
            raise AuthRefused(
                f"{hello.name} says Hello as {hello.role!r}, its key has the role {key_role!r}"
            )

    def _replace(self, peer: str, hello: Hello, now: float) -> None:
        """Register a worker; whoever had its name or its connection is gone."""
        known = self.registry.named(hello.name)
        for former in (known, self.registry.get(peer)):
            if former is not None:
                self._lose(former.peer, "registered again", now)
        self.registry.register(peer, hello, now)
        if self._next_beat is None:
            self._next_beat = now + self._heartbeat_s

    def _from_worker(self, worker: Worker, message: Message, now: float) -> None:
        match message:
            case Heartbeat():
                worker.liveness.heartbeat(now, message.progress_age_ms / 1e3)
                worker.beat = message
                if message.state == "draining" and not worker.is_draining:
                    self._begin_drain(worker, now)
            case Progress():
                worker.progress = message
            case Ready():
                self.registry.set_ready(worker, message)
                self.metrics.gauge("dflash_worker_up", 1, worker=worker.name)
                logger.info("%s is ready, %d sessions", worker.name, message.capacity)
            case Bye():
                self._lose(worker.peer, f"goodbye: {message.reason}", now)
            case LinkLost():
                self.requests.on_link_lost(worker, message, now)
            case Failed():
                self._session(worker, message.name, message, now)
            case PrefillProgress():
                self._session(worker, message.name, message, now)
            case Opened() | Prefilled():
                self._session(worker, message.session, message, now)
            case Drafted():
                self.registry.draft_took(worker, message.ms, is_in_time=False)
                self._session(worker, message.key.session, message, now)
            case DraftFailed() | Verified():
                self._session(worker, message.key.session, message, now)
            case _:
                raise BadRequest(f"{type(message).__name__} from a worker; not expected here")

    def _session(
        self,
        worker: Worker,
        session: str,
        message: Opened | PrefillProgress | Prefilled | Drafted | DraftFailed | Verified | Failed,
        now: float,
    ) -> None:
        if self.requests.on_session(worker, session, message, now):
            return
        self.metrics.count("dflash_stale")
        if isinstance(message, Opened | PrefillProgress | Prefilled):
            # An Open that overtook its Close would hold a place for ever.
            self._send(worker.peer, CloseSession(session))

    def _from_client(self, peer: str, message: Message, now: float) -> None:
        match message:
            case Submit():
                self._submit(peer, message, now)
            case Cancel():
                self.requests.stop(peer, message.request, now)
            case StatusRequest():
                self._send(peer, Status(message.request, self._status(now)))
            case Drain():
                self._drain(peer, message.name, now)
            case WorkerExited():
                worker = self.registry.named(message.name)
                if worker is not None:
                    self._lose(worker.peer, f"process ended: {message.reason}", now)
            case Bye():
                self._lose(peer, f"goodbye: {message.reason}", now)
            case _:
                raise BadRequest(f"{type(message).__name__} from a client; not expected here")

    def _submit(self, peer: str, message: Submit, now: float) -> None:
        if self.requests.has(peer, message.request):
            self.metrics.count("dflash_stale")  # the same Submit once more
            return
        try:
            if self.is_draining:
                raise Busy("the coordinator is going down; send the request elsewhere")
            SamplingParams.of(message.sampling)
            _check_prompt(message)
            self._n_requests += 1
            expires_at = now + message.deadline_ms / 1e3 if message.deadline_ms else None
            request = Request(
                self._n_requests,
                peer,
                message.request,
                message.prompt,
                message.sampling,
                message.draft,
                now,
                expires_at,
            )
            n_before = self.requests.submit(request, now)
        except DFlashError as fault:
            retry_after_s = fault.retry_after_s if isinstance(fault, Busy) else 0.0
            self._send(peer, Failed(message.request, fault.code, fault.message, retry_after_s))
            self.metrics.count("dflash_requests", result=fault.code)
            return
        self._send(peer, Accepted(message.request, message.sampling.seed, n_before))

    def _status(self, now: float) -> str:
        return status_body(self.registry, self.requests, now, is_draining=self.is_draining)

    # ------------------------------------------------------------------ workers that leave

    def _drain(self, admin: str, name: str, now: float) -> None:
        worker = self.registry.named(name)
        if worker is None:
            self._send(admin, Failed(name, BadRequest.code, f"no worker {name!r} is registered"))
            return
        self._drains.setdefault(name, []).append(admin)
        if not worker.is_draining:
            self._send(worker.peer, Drain(name))
            self._begin_drain(worker, now)

    def _begin_drain(self, worker: Worker, now: float) -> None:
        worker.is_draining = True
        self.requests.leave_drafter(worker, now)

    def _finish_drains(self, now: float) -> None:
        for name in list(self._drains):
            worker = self.registry.named(name)
            if worker is not None and worker.sessions:
                continue
            if worker is not None:
                self._send(worker.peer, Bye("drained"))
                self._lose(worker.peer, "drained", now)
            for admin in self._drains.pop(name):
                self._send(admin, Drained(name))

    def _lose(self, peer: str, reason: str, now: float) -> None:
        role = self._roles.pop(peer, None)
        worker = self.registry.get(peer)
        if worker is not None:
            logger.info("%s is gone: %s", worker.name, reason)
            self.registry.remove(worker)
            self.metrics.gauge("dflash_worker_up", 0, worker=worker.name)
            self.requests.worker_lost(worker, reason, now)
        elif role is not None:
            self.requests.client_lost(peer, now)

    # ------------------------------------------------------------------ the end of each call

    def _settled(self, now: float) -> list[Outgoing]:
        self.requests.settle(now)
        for worker, reason in self.requests.take_stuck():
            self._lose(worker.peer, f"stuck: {reason}", now)
            self.requests.settle(now)
        self._finish_drains(now)
        self.metrics.gauge("dflash_queue_depth", self.requests.n_waiting)
        out, self._out = self._out, []
        return out

    def _send(self, peer: str, message: Message) -> None:
        self._out.append(Outgoing(peer, message))

    def _beat(self, now: float) -> None:
        if self._next_beat is None or now < self._next_beat:
            return
        workers = list(self.registry)
        for worker in workers:
            self._send(worker.peer, Heartbeat("ready", len(self.requests), 0.0, 0))
        self._next_beat = now + self._heartbeat_s if workers else None

    def _bad(self, peer: str, kind: str, fault: DFlashError) -> None:
        role = self._roles.get(peer, "unknown")
        self.metrics.count("dflash_bad_messages", peer=role, kind=kind)
        logger.warning("dropped %s from %s: %s", kind, role, fault)


def _check_prompt(message: Submit) -> None:
    if message.prompt.dtype == "uint8":
        to_text(message.prompt)
    else:
        to_ids(message.prompt)
