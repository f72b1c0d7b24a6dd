"""What workers say, and how they leave.

Owns the dispatch of a registered worker's messages, draining and heartbeats to workers. Does not
know clients or how a connection begins. Times are passed in.
Invariant: a drained worker is told Bye, and its admins Drained, only when it holds no session.
"""

import logging
from typing import Protocol

from common.coordinator.events import Post
from common.coordinator.registry import Registry, Worker
from common.coordinator.requests import Requests
from common.coordinator.tally import Tally
from common.errors import BadRequest
from common.metrics import Metrics
from common.wire.messages import (
    Bye,
    Close,
    Drafted,
    DraftFailed,
    Drain,
    Drained,
    Failed,
    Heartbeat,
    LinkLost,
    Message,
    Opened,
    Prefilled,
    PrefillProgress,
    Progress,
    Ready,
    Verified,
)

logger = logging.getLogger(__name__)

OfSession = Opened | PrefillProgress | Prefilled | Drafted | DraftFailed | Verified | Failed


class Lose(Protocol):
    """Forgets a peer and tells everybody concerned."""

    def __call__(self, peer: str, reason: str, now: float) -> None:
        """The peer is gone."""
        ...


class Workers:
    """Speaks with registered workers.

    Args:
        registry: who they are.
        requests: what their messages are about.
        metrics: the gauge of ready workers.
        tally: what is counted.
        post: takes a message for a peer.
        lose: forgets a worker.
        heartbeat_s: time between two heartbeats to each worker.
    """

    def __init__(
        self,
        registry: Registry,
        requests: Requests,
        metrics: Metrics,
        tally: Tally,
        post: Post,
        lose: Lose,
        heartbeat_s: float,
    ) -> None:
        self._registry = registry
        self._requests = requests
        self._metrics = metrics
        self._tally = tally
        self._post = post
        self._lose = lose
        self._heartbeat_s = heartbeat_s
        self._admins: dict[str, list[str]] = {}  # that wait for Drained, by worker name
        self.next_beat: float | None = None  # monotonic seconds; None: nobody to tell

    def take(self, worker: Worker, message: Message, now: float) -> None:
        """Take one message.

        Raises:
            BadRequest: a message that workers do not send.
            ConfigError: a Ready with an impossible ladder.
        """
        match message:
            case Heartbeat():
                self._on_heartbeat(worker, message, now)
            case Progress():
                worker.progress = message
            case Ready():
                self._on_ready(worker, message)
            case Bye():
                self._lose(worker.peer, f"goodbye: {message.reason}", now)
            case LinkLost():
                self._requests.on_link_lost(worker, message, now)
            case Failed() | PrefillProgress():
                self._session(worker, message.name, message, now)
            case Opened() | Prefilled():
                self._session(worker, message.session, message, now)
            case Drafted():
                self._registry.draft_took(worker, message.ms, is_in_time=False)
                self._session(worker, message.key.session, message, now)
            case DraftFailed() | Verified():
                self._session(worker, message.key.session, message, now)
            case _:
                raise BadRequest(f"{type(message).__name__} from a worker; not expected here")

    def _on_heartbeat(self, worker: Worker, message: Heartbeat, now: float) -> None:
        worker.liveness.heartbeat(now, message.progress_age_ms / 1e3)
        worker.beat = message
        if message.state == "draining" and not worker.is_draining:
            self._begin_drain(worker, now)

    def _on_ready(self, worker: Worker, message: Ready) -> None:
        if worker.ready == message:
            return
        self._registry.set_ready(worker, message)
        self._metrics.gauge("dflash_worker_up", 1, worker=worker.name)
        logger.info("%s is ready, %d sessions at once", worker.name, message.capacity)

    def _session(self, worker: Worker, session: str, message: OfSession, now: float) -> None:
        if self._requests.on_session(worker, session, message, now):
            return
        self._tally.stale()
        if isinstance(message, Opened | PrefillProgress | Prefilled):
            # An Open that overtook its Close would hold a place for ever.
            self._post(worker.peer, Close(session))

    def drain(self, admin: str, name: str, now: float) -> None:
        """Let a worker finish and leave; `admin` hears Drained, or Failed for an unknown name."""
        worker = self._registry.named(name)
        if worker is None:
            text = f"no worker {name!r} is registered; `ps` lists them"
            self._post(admin, Failed(name, BadRequest.code, text))
            return
        self._admins.setdefault(name, []).append(admin)
        if not worker.is_draining:
            self._post(worker.peer, Drain(name))
            self._begin_drain(worker, now)

    def _begin_drain(self, worker: Worker, now: float) -> None:
        worker.is_draining = True
        self._requests.leave_drafter(worker, now)

    def finish_drains(self, now: float) -> None:
        """Say goodbye to drained workers that hold nothing any more."""
        for name in list(self._admins):
            worker = self._registry.named(name)
            if worker is not None and worker.is_draining:
                if worker.sessions:
                    continue
                self._post(worker.peer, Bye("drained"))
                self._lose(worker.peer, "drained", now)
            for admin in self._admins.pop(name):
                self._post(admin, Drained(name))

    def beat(self, now: float) -> None:
        """Send the heartbeats that are due."""
        workers = list(self._registry)
        if self.next_beat is None:
            self.next_beat = now + self._heartbeat_s if workers else None
        elif now >= self.next_beat:
            for worker in workers:
                self._post(worker.peer, Heartbeat("ready", len(self._requests), 0.0, 0))
            self.next_beat = now + self._heartbeat_s if workers else None
