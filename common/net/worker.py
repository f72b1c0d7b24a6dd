"""The shell that every worker process lives in: its links, and the compute thread's loop.

Owns when an actor is called, signals, draining and the exit code. Does not know what the actor
does. The compute thread is the one that calls `run` (MLX is used from one thread only).
Invariant: the actor is called by the compute thread only, messages first, then deadlines, then
background work; the process ends on Bye, after draining, on the second signal, or with its parent.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Final, Self

from common.net.auth import Keys
from common.net.handover import Handover, Inward, Stop
from common.net.links import Lost
from common.net.transport import CONTROL_PEER, Actor, Endpoint, Peer
from common.net.worker_io import WorkerIO
from common.wire.codec import pack
from common.wire.messages import Drain, Hello, Message, Scalar

logger = logging.getLogger(__name__)

SWITCH_S: Final = 5e-4  # the I/O thread gets the interpreter this soon (default 5 ms)
MAX_WAIT_S: Final = 0.5  # nothing depends on it: a fuse against a lost wake-up
MAX_IN_A_ROW: Final = 64  # messages before deadlines are looked at again
DRAIN_LOOK_S: Final = 0.02  # how often a draining worker looks whether it is empty
GRACE_S: Final = 20.0


class WorkerShell:
    """Connects a worker to the coordinator and runs its actor.

    Args:
        role: "target" or "drafter".
        name: "target.1".
        control: the coordinator's endpoint.
        keys: own pair; needed for every tcp endpoint.
        hello: makes the present Hello; called on every connection, by the I/O thread.
        data_bind: where a target's data socket listens; None for a drafter.
        heartbeat_ms: until the coordinator's Welcome says otherwise.
        grace_s: how long sessions may finish after the first signal.
        parent_pid: the process to die with; 0: none.
    """

    def __init__(
        self,
        *,
        role: str,
        name: str,
        control: Endpoint,
        hello: Callable[[], Hello],
        keys: Keys | None = None,
        data_bind: str | None = None,
        heartbeat_ms: int = 500,
        grace_s: float = GRACE_S,
        parent_pid: int = 0,
    ) -> None:
        self.role, self.name = role, name
        self._keys, self._grace_s = keys, grace_s
        self._actor: Actor | None = None
        self._busy_since: float | None = time.monotonic()  # None: waiting for something to do
        self._drain_by: float | None = None  # set by the first signal
        self._is_draining = False
        self._is_closed = False
        self._stop: Stop | None = None
        self._handover = Handover()
        self._io = WorkerIO(
            self._handover,
            control=control,
            keys=keys,
            hello=hello,
            beat=self._beat,
            heartbeat_s=heartbeat_ms / 1000,
            data_bind=data_bind,
            parent_pid=parent_pid,
        )
        self._io.start()

    # ------------------------------------------------------------------ for the actor

    def send(self, peer: Peer, message: Message) -> bool:
        """Send at once, or not at all; False: the peer is gone or at its mark. Any thread.

        Raises:
            WireError: the message cannot be packed.
        """
        return self._io.send(peer, pack(message))

    def dial(self, endpoint: str, server_key: str) -> Peer:
        """Open, or reuse, the data link to a target; what is sent before it stands is held.

        A link that does not stand in `worker_io.DIAL_S` is an `on_lost`.

        Raises:
            ConfigError: no proper address.
            KeyFault: the endpoint asks for a key and this process has none.
        """
        self._io.dial(Endpoint(endpoint, server_key))
        return Peer(endpoint)

    def hang_up(self, peer: Peer) -> None:
        """Close a dialled link, after what was sent to it; no `on_lost` follows."""
        self._io.hang_up(peer.link)

    # ------------------------------------------------------------------ for the service's main

    @property
    def data_endpoint(self) -> str:
        """Where the data socket listens, with the real port; "" without one."""
        return self._io.data_address

    @property
    def data_public_key(self) -> str:
        """CURVE key of the data socket; "" on ipc."""
        is_tcp = self.data_endpoint.startswith("tcp://")
        return self._keys.public_key if self._keys is not None and is_tcp else ""

    def report(self, message: Message) -> None:
        """Tell the coordinator: Hello, Progress, Ready. Counts as progress of this thread.

        Raises:
            WireError: the message cannot be packed.
        """
        self._busy_since = time.monotonic()
        pack(message)  # a slip shows here, not on the I/O thread
        self._io.registration.say(message)

    def check(self) -> None:
        """Between steps of loading: leave if the coordinator refused us or the parent is gone.

        Raises:
            SystemExit: with the exit code.
        """
        while self._stop is None:
            item = self._handover.take()
            if item is None:
                return
            if isinstance(item, Stop):
                self._stop = item
        logger.error("ending: %s", self._stop.reason)
        raise SystemExit(self._stop.exit_code)

    def run(self, actor: Actor) -> int:
        """Drive the actor until the end of this process's work.

        Returns:
            The exit code.
        """
        self._actor = actor
        sys.setswitchinterval(SWITCH_S)
        self._install_signals()
        has_work = True
        while self._stop is None:
            has_work = self._step(actor, has_work=has_work)
            self._end_when_drained(actor)
        logger.info("ending: %s", self._stop.reason)
        self.close(self._stop.reason)
        return self._stop.exit_code

    def close(self, last_words: str = "closed") -> None:
        """Say goodbye and close every socket; safe to call twice."""
        if not self._is_closed:
            self._is_closed = True
            self._io.end(last_words)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close("failed" if fault else "closed")

    # ------------------------------------------------------------------ the compute thread

    def _step(self, actor: Actor, *, has_work: bool) -> bool:
        """Messages, then a deadline, then one piece of work; True: there is more work."""
        self._take_messages(actor, wait_s=0.0 if has_work else self._wait_s(actor))
        if self._stop is not None:
            return False
        deadline, now = actor.next_deadline(), time.monotonic()
        if deadline is not None and now >= deadline:
            actor.on_time(now)
        has_more = actor.work(time.monotonic())
        self._busy_since = time.monotonic()
        return has_more

    def _take_messages(self, actor: Actor, wait_s: float) -> None:
        """Wait for the first message, then take those that are there."""
        self._busy_since = None
        self._io.wait(wait_s)
        self._busy_since = time.monotonic()
        for _ in range(MAX_IN_A_ROW):
            item = self._handover.take()
            if item is None or self._stop is not None:
                return
            self._handle(actor, item)
            self._busy_since = time.monotonic()

    def _handle(self, actor: Actor, item: Inward) -> None:
        if isinstance(item, Stop):
            self._stop = item
            return
        peer, message = item
        if isinstance(message, Lost):
            actor.on_lost(peer, time.monotonic())
        elif isinstance(message, Drain) and peer == CONTROL_PEER:
            self._is_draining = True
            self._io.registration.beat_now()  # the coordinator says Bye once we are empty
        else:
            actor.on_message(peer, message, time.monotonic())

    def _wait_s(self, actor: Actor) -> float:
        deadline = actor.next_deadline()
        longest = MAX_WAIT_S if self._drain_by is None else DRAIN_LOOK_S
        return longest if deadline is None else min(longest, deadline - time.monotonic())

    def _end_when_drained(self, actor: Actor) -> None:
        if self._drain_by is None or self._stop is not None:
            return
        if actor.heartbeat()[1] == 0:
            self._stop = Stop(0, "drained")
        elif time.monotonic() >= self._drain_by:
            self._stop = Stop(0, f"{self._grace_s:g} s of grace are over")

    def _install_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """First: finish what runs, then leave. Second: leave now."""
        if self._drain_by is not None:
            os._exit(128 + number)
        self._drain_by = time.monotonic() + self._grace_s
        self._handover.put((CONTROL_PEER, Drain(self.name)))
        self._handover.wake()

    def _beat(self) -> tuple[str, int, float, Mapping[str, Scalar]]:
        """State, sessions, seconds without progress, counters; called by the I/O thread."""
        since = self._busy_since
        age_s = 0.0 if since is None else max(0.0, time.monotonic() - since)
        if self._actor is None:
            return "starting", 0, age_s, self._io.counters
        state, n_sessions, counters = self._actor.heartbeat()
        state = "draining" if self._is_draining else state
        return state, n_sessions, age_s, {**counters, **self._io.counters}
