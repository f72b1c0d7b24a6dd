"""ZeroMQ sockets as this system wants them: every option with its reason, checked addresses.

Owns socket options, bind and connect rules, and loss detection through socket monitors. Does not
know messages. Sockets belong to the thread that made them.
Invariant: nothing here blocks; a send that cannot be done at once is refused.
"""

import ipaddress
import os
import socket as system_socket
import struct
from pathlib import Path
from typing import Final

import zmq

from common.errors import AddressInUse, ConfigError, KeyFault
from common.net.auth import Keys
from common.net.transport import Endpoint
from common.wire.codec import MAX_FRAME_BYTES

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

# Only a fuse: a peer this many messages behind is in trouble. A long prompt's features go out in
# one burst of chunks, 256 tokens each, so the data plane needs no less than the control plane.
HWM: Final = 1024

_OPTIONS: Final[dict[int, int]] = {
    zmq.LINGER: 0,  # closing never waits for a peer
    zmq.MAXMSGSIZE: MAX_FRAME_BYTES,  # the peer is cut off before memory is
    zmq.HANDSHAKE_IVL: 3000,  # ms; a silent stranger holds a socket no longer (default 30 s)
    zmq.HEARTBEAT_IVL: 1000,  # ms; sees a cut cable or a stopped host, not a busy thread
    zmq.HEARTBEAT_TIMEOUT: 5000,  # ms; SIGSTOP of a peer shows within this
    zmq.RECONNECT_IVL: 100,  # ms
    zmq.RECONNECT_IVL_MAX: 5000,  # ms; a refused peer tries 8 times a second without it
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 30,  # s; below the idle limits of common routers
}
_ROUTER_OPTIONS: Final[dict[int, int]] = {
    zmq.ROUTER_MANDATORY: 1,  # an unknown peer or one at its mark is an error, not silence
}
_DEALER_OPTIONS: Final[dict[int, int]] = {
    zmq.IMMEDIATE: 1,  # nothing is queued for a server that is not there: stale on arrival
}

EVENTS: Final = int(zmq.EVENTS)
READABLE: Final = int(zmq.POLLIN)  # plain ints: the enums' own arithmetic costs 10 us a look
WATCHED: Final = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)
REFUSALS: Final = frozenset({zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL})


def open_router(
    context: Context, address: str, keys: Keys | None, *, hwm: int, is_insecure: bool = False
) -> tuple[Socket, str]:
    """Bind a ROUTER; a tcp address needs keys, and their allow-list is asked by ZAP.

    Returns:
        The socket and the address it got ("tcp://host:*" becomes a port).

    Raises:
        AddressInUse: somebody listens there.
        ConfigError: no proper address, or an ipc path over the platform's limit.
        KeyFault: tcp without CURVE, unless it is loopback and `is_insecure`.
    """
    _check_bind(address, keys, is_insecure=is_insecure)
    socket = _open(context, zmq.ROUTER, hwm, _ROUTER_OPTIONS, address)
    if keys is not None and not address.startswith("ipc://"):
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret_key.encode())
    try:
        socket.bind(address)
    except zmq.ZMQError as fault:
        socket.close(0)
        if fault.errno == zmq.EADDRINUSE:
            raise AddressInUse(f"{address}: expected a free address, got one in use") from fault
        raise ConfigError(f"{address}: expected an address to bind, got {fault}") from fault
    if address.startswith("ipc://"):
        os.chmod(address.removeprefix("ipc://"), 0o600)
    return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


def open_dealer(
    context: Context,
    endpoint: Endpoint,
    keys: Keys | None,
    *,
    hwm: int,
    holds_until_up: bool = False,
) -> tuple[Socket, "Monitor"]:
    """Connect a DEALER, watched from before the first attempt.

    Args:
        context: of this process.
        endpoint: where, and whose key must answer.
        keys: own pair.
        hwm: most messages queued in each direction.
        holds_until_up: queue what is sent before the connection stands. Only for a link that is
            closed, not reconnected, when it is lost.

    Raises:
        ConfigError: no proper address.
        KeyFault: the endpoint has a server key, but there is no own pair.
    """
    check_address(endpoint.address)
    if endpoint.server_key and keys is None:
        raise KeyFault(
            f"{endpoint.address}: expected an own key pair, got none; make one: keys new"
        )
    options = {} if holds_until_up else _DEALER_OPTIONS
    socket = _open(context, zmq.DEALER, hwm, options, endpoint.address)
    if endpoint.server_key and keys is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, endpoint.server_key.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public_key.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret_key.encode())
    monitor = Monitor(socket)
    try:
        socket.connect(endpoint.address)
    except zmq.ZMQError as fault:
        monitor.close()
        socket.close(0)
        raise ConfigError(f"{endpoint.address}: expected an address, got {fault}") from fault
    return socket, monitor


class Monitor:
    """Connection events of one socket, as (event, file descriptor of the connection)."""

    def __init__(self, socket: Socket) -> None:
        self._watched = socket
        self.socket: Socket = socket.get_monitor_socket(WATCHED)

    def events(self) -> list[tuple[int, int]]:
        """What happened since the last look; never blocks."""
        found: list[tuple[int, int]] = []
        while int(self.socket.getsockopt(EVENTS)) & READABLE:
            found.append(struct.unpack("=Hi", self.socket.recv_multipart(zmq.NOBLOCK)[0]))
        return found

    def close(self) -> None:
        """Stop watching; before the watched socket is closed."""
        self._watched.disable_monitor()
        self.socket.close(0)


def check_address(address: str) -> None:
    """Refuse what is neither a short enough ipc path nor tcp with a port.

    Raises:
        ConfigError: names the limit.
    """
    if address.startswith("ipc://"):
        n_bytes = len(os.fsencode(address.removeprefix("ipc://")))
        if not 0 < n_bytes <= zmq.IPC_PATH_MAX_LEN:
            raise ConfigError(
                f"{address}: expected a path of 1..{zmq.IPC_PATH_MAX_LEN} bytes (the platform's "
                f"limit for sockets), got {n_bytes}; choose a shorter run directory"
            )
    elif not (address.startswith("tcp://") and ":" in address.removeprefix("tcp://")):
        raise ConfigError(f"{address!r}: expected ipc://PATH or tcp://HOST:PORT")


def is_loopback(address: str) -> bool:
    """Whether only this host can reach a tcp address; a name other than localhost is not."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_bind(address: str, keys: Keys | None, *, is_insecure: bool) -> None:
    check_address(address)
    if address.startswith("ipc://"):
        _refuse_taken_path(Path(address.removeprefix("ipc://")))
    elif keys is None and not (is_insecure and is_loopback(address)):
        raise KeyFault(
            f"{address}: expected CURVE keys for a tcp address, got none; make them: keys new"
            + ("" if is_loopback(address) else " (outside loopback there is no way round)")
        )


def _refuse_taken_path(path: Path) -> None:
    """ZeroMQ unlinks whatever is at the path, also a socket that somebody listens on."""
    if is_listening(path):
        raise AddressInUse(f"ipc://{path}: expected a free path, got one that somebody listens on")


def is_listening(path: Path) -> bool:
    """Whether somebody serves a socket file; one that a killed process left does not count."""
    with system_socket.socket(system_socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _open(context: Context, kind: int, hwm: int, options: dict[int, int], address: str) -> Socket:
    socket = context.socket(kind)
    for option, value in (_OPTIONS | options).items():
        socket.setsockopt(option, value)
    socket.setsockopt(zmq.SNDHWM, hwm)
    socket.setsockopt(zmq.RCVHWM, hwm)
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)  # only where an address asks for it
    return socket
