"""Connections of a client for plain Python: one per request in flight, idle ones kept for the next.

Owns opening, Hello and the idle ones. Does not know requests. Safe to use from several threads.
"""

import threading

from common.net.zeromq import CONNECT_S, ClientLink
from common.sdk.locate import Address
from common.sdk.request import HELLO_S, check_welcome, client_hello


class Pool:
    """Connections to one coordinator.

    Args:
        address: where it is.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self._idle: list[ClientLink] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def take(self) -> ClientLink:
        """An idle connection, or a new one."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self.open()

    def open(self, timeout_s: float | None = None) -> ClientLink:
        """A new connection that was welcomed.

        Raises:
            NotReady, PeerLost, PeerSilent: nobody answered in time.
            AuthRefused, VersionMismatch: the coordinator's reason to refuse.
        """
        link = ClientLink(self.address.endpoint, self.address.keys)
        try:
            link.connect() if timeout_s is None else link.connect(min(timeout_s, CONNECT_S))
            link.send(client_hello())
            check_welcome(link.recv(HELLO_S if timeout_s is None else min(timeout_s, HELLO_S)))
        except BaseException:
            link.close()
            raise
        return link

    def give(self, link: ClientLink) -> None:
        """A connection that nobody needs now."""
        with self._lock:
            if not self._is_closed:
                self._idle.append(link)
                return
        link.close()

    def forget_idle(self) -> None:
        """Close idle connections: one to the same coordinator broke."""
        with self._lock:
            links, self._idle = self._idle, []
        for link in links:
            link.close()

    def close(self) -> None:
        """Close idle connections, and those that are given back from now on."""
        with self._lock:
            self._is_closed = True
        self.forget_idle()
