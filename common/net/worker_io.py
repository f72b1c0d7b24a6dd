"""The sockets of a worker, and the thread that keeps it answering while it computes.

Owns the data ROUTER, the dialled DEALERs, who reads, and heartbeats; the control DEALER through
`Registration`. Does not know the actor.

Who reads: the compute thread itself while it waits for something to do, so that a message costs
no turn from thread to thread; else this thread, every TICK_S. A lock says whose turn it is. This
thread sends the heartbeats and watches the parent, and never waits for the compute thread.
Invariant: sockets are read and closed under that lock; messages to one peer keep their order,
since the thread that has one sends it itself.
"""

import logging
import os
import select
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import zmq

from common.errors import WireError
from common.net.auth import AllowList, Authenticator, Keys
from common.net.handover import Handover, Stop
from common.net.links import MAX_BATCH, Connected, DealerLink, Event, Lost, RouterLink
from common.net.registration import LAST_WORDS_MS, Beat, Registration
from common.net.sockets import HWM, Context
from common.net.transport import CONTROL_LINK, CONTROL_PEER, DATA_LINK, Endpoint, Peer
from common.wire.codec import Frame
from common.wire.messages import Hello
from common.wire.roles import CONTROL, COORDINATOR, DATA, DRAFTER, TARGET, may_send

logger = logging.getLogger(__name__)

TICK_S: Final = 0.02  # how long a message may lie while the compute thread is busy
DIAL_S: Final = 3.0  # a data link that does not stand by then is lost
PARENT_CHECK_S: Final = 0.5
PARENT_GRACE_S: Final = 1.0  # for the compute thread, once the launcher is gone


@dataclass(slots=True)
class Dialled:
    """A data link to a target."""

    link: DealerLink
    give_up_at: float | None  # None once it stands


class WorkerIO(threading.Thread):
    """Started by `WorkerShell`.

    Attributes:
        data_address: where drafters connect; "" without a data socket.
        counters: bad and forbidden messages, by name.
    """

    def __init__(
        self,
        handover: Handover,
        *,
        control: Endpoint,
        keys: Keys | None,
        hello: Callable[[], Hello],
        beat: Beat,
        heartbeat_s: float,
        data_bind: str | None,
        parent_pid: int,
    ) -> None:
        super().__init__(name="worker-io", daemon=True)
        self.counters: Counter[str] = Counter(bad_messages=0)
        self._handover, self._keys = handover, keys
        self._parent_pid, self._orphaned_at = parent_pid, float("inf")
        self._next_parent_check = 0.0 if parent_pid else float("inf")
        self._ending = threading.Event()
        self._reading = threading.Lock()
        self._is_unread = True  # something may lie on a socket without its descriptor saying so
        self._dialled: dict[str, Dialled] = {}
        self._context: Context = zmq.Context()
        self._authenticator: Authenticator | None = None
        self._data: RouterLink | None = None
        self._poll = select.poll()  # on descriptors: zmq's own poll would touch the sockets
        self._poll.register(handover.wake_fd, select.POLLIN)
        try:
            if data_bind:
                self._data = self._bind_data(data_bind)
            link = DealerLink(self._context, control, keys, hwm=HWM)
        except BaseException:
            self._release()
            raise
        self._watch(link)
        self.registration = Registration(link, handover, hello, beat, heartbeat_s)
        self.data_address = self._data.address if self._data else ""

    def _bind_data(self, address: str) -> RouterLink:
        keyed = None if address.startswith("ipc://") else self._keys
        allowed = AllowList(keyed.folder) if keyed else None
        if allowed is not None:
            self._authenticator = Authenticator(self._context, allowed)
        link = RouterLink(self._context, address, keyed, allowed, hwm=HWM)
        self._watch(link)
        return link

    # ------------------------------------------------------------------ the thread

    def run(self) -> None:
        """Read when nobody else does, and send heartbeats, until `end`."""
        try:
            while not self._ending.wait(TICK_S):
                if self._reading.acquire(blocking=False):
                    try:
                        self._read()
                    finally:
                        self._reading.release()
                self._on_time(time.monotonic())
        except BaseException as fault:
            self._give_up(Stop(1, f"the I/O thread failed: {fault!r}"))
            raise

    def _on_time(self, now: float) -> None:
        self.registration.on_time(now)
        if self.registration.link.gate.has_more:
            self._handover.wake()
        if now >= self._next_parent_check:
            self._next_parent_check = now + PARENT_CHECK_S
            self._check_parent(now)

    def _check_parent(self, now: float) -> None:
        if os.getppid() == self._parent_pid:
            return
        if self._orphaned_at == float("inf"):
            self._orphaned_at = now
            self._give_up(Stop(1, "the launcher is gone"))
        elif now - self._orphaned_at > PARENT_GRACE_S:
            os._exit(1)  # the compute thread is in one long call; nobody waits for its result

    def _give_up(self, stop: Stop) -> None:
        self._handover.put(stop)
        self._handover.wake()

    # ------------------------------------------------------------------ reading (under the lock)

    def _read(self) -> None:
        """Take what came on every link; never blocks."""
        events = self.registration.link.read()
        longest = len(events)
        for event in events:
            if not self.registration.handle(event):
                self._take(CONTROL_PEER, event, CONTROL, COORDINATOR)
        if self._data is not None:
            longest = max(longest, self._read_data(self._data))
        now = time.monotonic()
        for endpoint, dialled in list(self._dialled.items()):
            events = dialled.link.read()
            longest = max(longest, len(events))
            for event in events:
                self._on_dialled(endpoint, dialled, event)
            if dialled.give_up_at is not None and now >= dialled.give_up_at:
                self._lose(endpoint, dialled)
        self._is_unread = longest >= MAX_BATCH

    def _read_data(self, link: RouterLink) -> int:
        found = link.read()
        for peer_id, body, role, _ in found:
            peer = Peer(DATA_LINK, peer_id)
            if isinstance(body, Lost):
                self._handover.put((peer, body))
            else:
                self._take(peer, body, DATA, role if link.is_keyed else DRAFTER)
        return len(found)

    def _on_dialled(self, endpoint: str, dialled: Dialled, event: Event) -> None:
        if isinstance(event, Connected):
            dialled.give_up_at = None
        elif isinstance(event, Lost):
            self._lose(endpoint, dialled)
        else:
            self._take(Peer(endpoint), event, DATA, TARGET)

    def _take(self, peer: Peer, event: Event, plane: str, role: str) -> None:
        """Pass a message on if it is one, and its sender may send it."""
        if isinstance(event, WireError):
            self.counters["bad_messages"] += 1
            logger.warning("bad message on %s: %s", peer.link, event)
        elif isinstance(event, Connected | Lost):
            raise AssertionError(f"{event} is no message")
        elif not may_send(plane, role, type(event)):
            self.counters["bad_messages"] += 1
            logger.warning("%s may not send %s on %s", role, type(event).__name__, peer.link)
        else:
            self._handover.put((peer, event))

    def _lose(self, endpoint: str, dialled: Dialled) -> None:
        if self._dialled.get(endpoint) is dialled:
            del self._dialled[endpoint]
            self._handover.put((Peer(endpoint), Lost()))
            self._close(dialled.link)

    def _watch(self, link: DealerLink | RouterLink) -> None:
        for socket in (link.socket, link.monitor.socket):
            self._poll.register(socket.FD, select.POLLIN)
        self._is_unread = True

    def _close(self, link: DealerLink) -> None:
        for socket in (link.socket, link.monitor.socket):
            self._poll.unregister(socket.FD)
        link.close(LAST_WORDS_MS)

    # ------------------------------------------------------------------ for the compute thread

    def wait(self, timeout_s: float) -> None:
        """Read what comes, until something lies in the inbox or the time is up; looks once."""
        deadline = time.monotonic() + timeout_s
        with self._reading:
            while self._handover.is_empty():
                left_ms = max(0.0, (deadline - time.monotonic()) * 1000)
                wait_ms = 0.0 if self._is_unread else min(left_ms, self._dial_ms())
                ready = self._poll.poll(wait_ms)
                if any(fd == self._handover.wake_fd for fd, _ in ready):
                    self._handover.clear()
                self._read()
                if left_ms <= 0 and not self._is_unread:
                    return

    def _dial_ms(self) -> float:
        """Until the next dialled link is given up."""
        due = [at for dialled in self._dialled.values() if (at := dialled.give_up_at) is not None]
        return max(0.0, (min(due) - time.monotonic()) * 1000) if due else float("inf")

    def send(self, peer: Peer, frames: list[Frame]) -> bool:
        """Send at once, or not at all; False: the peer is gone or at its mark."""
        link: DealerLink | RouterLink | None
        if peer.link == CONTROL_LINK:
            link, is_sent = self.registration.link, self.registration.send(frames)
        elif peer.link == DATA_LINK:
            link = self._data
            is_sent = link is not None and link.send_frames(peer.id, frames)
        else:
            dialled = self._dialled.get(peer.link)
            link = dialled.link if dialled else None
            is_sent = link is not None and link.send_frames(frames)
        if link is not None and link.gate.has_more:
            self._is_unread = True
        # libzmq's own thread writes the bytes. Where cores are scarce it would wait for a slice of
        # this one's time: measured on two cores, 3.3 ms without the yield, 0.34 ms with it.
        os.sched_yield()
        return is_sent

    def dial(self, endpoint: Endpoint) -> None:
        """Open a data link, unless it is open; what is sent before it stands is held."""
        if endpoint.address in self._dialled:
            return
        keys = self._keys if endpoint.server_key else None
        link = DealerLink(self._context, endpoint, keys, hwm=HWM, holds_until_up=True)
        with self._reading:
            self._dialled[endpoint.address] = Dialled(link, time.monotonic() + DIAL_S)
            self._watch(link)

    def hang_up(self, endpoint: str) -> None:
        """Close a data link, after what was sent on it (at most LAST_WORDS_MS)."""
        with self._reading:
            dialled = self._dialled.pop(endpoint, None)
            if dialled is not None:
                self._close(dialled.link)

    def end(self, last_words: str) -> None:
        """Say goodbye, end the thread, and close every socket."""
        self._ending.set()
        self.join()
        with self._reading:
            self.registration.leave(last_words)
            self._release()
            self._handover.close()

    def _release(self) -> None:
        """Close every socket, and the context once goodbyes are out."""
        for dialled in self._dialled.values():
            dialled.link.close()
        self._dialled.clear()
        if self._data is not None:
            self._data.close()
        if self._authenticator is not None:
            self._authenticator.close()
        if hasattr(self, "registration"):
            self.registration.close()
        self._context.term()
