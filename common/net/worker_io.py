"""The I/O thread of a worker: every socket of the process, and the waiting.

Owns the data ROUTER, the dialled DEALERs and the poll loop; the control DEALER through
`Registration`. Does not know the actor. It answers for the process while the compute thread
computes, and each heartbeat says how long that has not got on.
Invariant: sockets are touched by this thread only; it never waits longer than to the next
heartbeat; messages to one peer keep their order.
"""

import logging
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import zmq

from common.errors import WireError
from common.net.auth import AllowList, Authenticator, Keys
from common.net.handover import Handover, Stop
from common.net.links import Connected, DealerLink, Event, Lost, RouterLink
from common.net.registration import CONTROL_PEER, Beat, Registration
from common.net.sockets import CONTROL_HWM, DATA_HWM, Context
from common.net.transport import DATA_LINK, Endpoint, Peer
from common.wire.codec import Frame
from common.wire.messages import Hello
from common.wire.roles import CONTROL, COORDINATOR, DATA, DRAFTER, TARGET, may_send

logger = logging.getLogger(__name__)

DIAL_S: Final = 3.0  # a data link that does not stand by then is lost
RETRY_MS: Final = 5  # how soon a peer at its mark is tried again
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
        self._is_ending = False
        self._dialled: dict[str, Dialled] = {}
        self._context: Context = zmq.Context()
        self._authenticator: Authenticator | None = None
        self._data: RouterLink | None = None
        self._poller = zmq.Poller()
        self._poller.register(handover.wake_fd, zmq.POLLIN)
        try:
            if data_bind:
                self._data = self._bind_data(data_bind)
            link = DealerLink(self._context, control, keys, hwm=CONTROL_HWM)
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
        link = RouterLink(self._context, address, keyed, allowed, hwm=DATA_HWM)
        self._watch(link)
        return link

    # ------------------------------------------------------------------ the loop

    def run(self) -> None:
        """Move messages until `end`."""
        try:
            while not self._is_ending:
                ready: set[Any] = {source for source, _ in self._poller.poll(self._timeout_ms())}
                self._read(ready)
                self._write(is_woken=self._handover.wake_fd in ready)
                self._on_time(time.monotonic())
        except BaseException as fault:
            self._handover.inbox.put(Stop(1, f"the I/O thread failed: {fault!r}"))
            raise
        finally:
            self._release()

    def _timeout_ms(self) -> int:
        if self._handover.behind:
            return RETRY_MS
        due = min(self.registration.next_beat, self._next_parent_check)
        for dialled in self._dialled.values():
            due = min(due, dialled.give_up_at or due)
        return max(0, math.ceil((due - time.monotonic()) * 1000))

    def _read(self, ready: set[Any]) -> None:
        if _is_ready(self.registration.link, ready):
            for event in self.registration.link.read():
                if not self.registration.handle(event):
                    self._take(CONTROL_PEER, event, CONTROL, COORDINATOR)
        if self._data is not None and _is_ready(self._data, ready):
            self._read_data(self._data)
        for endpoint, dialled in list(self._dialled.items()):
            if _is_ready(dialled.link, ready):
                for event in dialled.link.read():
                    self._on_dialled(endpoint, dialled, event)

    def _read_data(self, link: RouterLink) -> None:
        for peer_id, body, role in link.read():
            peer = Peer(DATA_LINK, peer_id)
            if isinstance(body, Lost):
                self._handover.lose(peer)
            else:
                self._handover.live.add(peer)
                self._take(peer, body, DATA, role if link.is_keyed else DRAFTER)

    def _on_dialled(self, endpoint: str, dialled: Dialled, event: Event) -> None:
        if isinstance(event, Connected):
            dialled.give_up_at = None
        elif isinstance(event, Lost):
            self.hang_up(endpoint)
            self._handover.lose(Peer(endpoint))
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
            self._handover.inbox.put((peer, event))

    def _write(self, *, is_woken: bool) -> None:
        self._catch_up()
        for outward in self._handover.take(is_woken=is_woken):
            if callable(outward):
                outward()
            else:
                self._send(*outward)

    def _catch_up(self) -> None:
        """Try again what peers at their mark did not take, in order."""
        for peer, waiting in list(self._handover.behind.items()):
            while waiting and self._send_now(peer, waiting[0]):
                waiting.popleft()
            if not waiting:
                del self._handover.behind[peer]

    def _send(self, peer: Peer, frames: list[Frame]) -> None:
        waiting = self._handover.behind.get(peer)
        if waiting is not None:
            waiting.append(frames)
        elif peer in self._handover.live and not self._send_now(peer, frames):
            self._handover.behind[peer] = deque([frames])

    def _send_now(self, peer: Peer, frames: list[Frame]) -> bool:
        if peer == CONTROL_PEER:
            return self.registration.link.send_frames(frames)
        if peer.link == DATA_LINK:
            return self._data is not None and self._data.send_frames(peer.id, frames)
        dialled = self._dialled.get(peer.link)
        return dialled is not None and dialled.link.send_frames(frames)

    def _on_time(self, now: float) -> None:
        self.registration.on_time(now)
        for endpoint, dialled in list(self._dialled.items()):
            if dialled.give_up_at is not None and now >= dialled.give_up_at:
                self.hang_up(endpoint)
                self._handover.lose(Peer(endpoint))
        if now >= self._next_parent_check:
            self._next_parent_check = now + PARENT_CHECK_S
            self._check_parent(now)

    def _check_parent(self, now: float) -> None:
        if os.getppid() == self._parent_pid:
            return
        if self._orphaned_at == float("inf"):
            self._orphaned_at = now
            self._handover.inbox.put(Stop(1, "the launcher is gone"))
        elif now - self._orphaned_at > PARENT_GRACE_S:
            os._exit(1)  # the compute thread is in one long call; nobody waits for its result

    # ------------------------------------------------------------------ orders (on this thread)

    def dial(self, endpoint: Endpoint) -> None:
        """Open a data link, unless it is open."""
        self._handover.live.add(Peer(endpoint.address))
        if endpoint.address not in self._dialled:
            keys = self._keys if endpoint.server_key else None
            link = DealerLink(self._context, endpoint, keys, hwm=DATA_HWM)
            self._dialled[endpoint.address] = Dialled(link, time.monotonic() + DIAL_S)
            self._watch(link)

    def hang_up(self, endpoint: str) -> None:
        """Close a data link; what it did not take is dropped."""
        dialled = self._dialled.pop(endpoint, None)
        if dialled is not None:
            self._handover.behind.pop(Peer(endpoint), None)
            for socket in (dialled.link.socket, dialled.link.monitor.socket):
                self._poller.unregister(socket)
            dialled.link.close()

    def end(self) -> None:
        """Leave the loop."""
        self._is_ending = True

    def _watch(self, link: DealerLink | RouterLink) -> None:
        for socket in (link.socket, link.monitor.socket):
            self._poller.register(socket, zmq.POLLIN)

    def _release(self) -> None:
        """Close every socket; only the control socket may linger, for the goodbye."""
        self._handover.live.clear()
        for endpoint in list(self._dialled):
            self.hang_up(endpoint)
        if self._data is not None:
            self._data.close()
        if self._authenticator is not None:
            self._authenticator.close()
        if hasattr(self, "registration"):
            self.registration.link.monitor.close()
            self.registration.link.socket.close()
        self._context.term()
        self._handover.close()


def _is_ready(link: DealerLink | RouterLink, ready: set[Any]) -> bool:
    return link.socket in ready or link.monitor.socket in ready
