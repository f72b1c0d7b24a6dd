"""CURVE keys, the allow-list that gives each key a role, and the ZAP handler that asks it.

Owns the key folder:

    <keys>/            0700
    ├── NAME.key       0600  own pair of this machine: name, role, public_key, secret_key
    └── keys.d/        0700
        └── NAME.pub   0600  a peer that may connect: role, public_key

Does not know messages or what a role may do (`common.wire.roles`). A secret key is never in an
argument, an environment variable, a log line or a `repr`.
Invariant: without an entry in `keys.d` a key opens nothing; an entry that goes away closes the
door for new connections at once and for messages of old ones within RELOAD_S.
"""

import logging
import os
import re
import stat
import threading
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import zmq
from zmq.utils import z85

from common.errors import KeyFault
from common.wire.roles import ROLES

logger = logging.getLogger(__name__)

RELOAD_S: Final = 1.0  # how old the allow-list may be before its folder is looked at again
ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"  # fixed by ZeroMQ RFC 27
POLL_MS: Final = 200  # how long the handler's thread takes to notice that it should end

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_Z85: Final = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclass(frozen=True, slots=True)
class Listed:
    """One entry of the allow-list."""

    name: str
    role: str
    public_key: str  # Z85

    @property
    def user_id(self) -> str:
        """What the ZAP handler writes on every message of this key: `role/name`."""
        return f"{self.role}/{self.name}"


@dataclass(frozen=True, slots=True)
class Keys:
    """This process's own pair, and the folder with the allow-list."""

    name: str
    role: str
    public_key: str
    secret_key: str = field(repr=False)
    folder: Path


def new_keys(folder: Path, name: str, role: str) -> Keys:
    """Make a pair and allow it here; `keys.d/NAME.pub` is what the other machine needs.

    Raises:
        KeyFault: bad name or role, no CURVE in this libzmq, or the name is taken.
    """
    if not zmq.has("curve"):
        raise KeyFault("keys: this libzmq was built without CURVE; install the pyzmq wheel")
    _check_name_and_role(name, role)
    _make_private_folder(folder)
    _make_private_folder(folder / "keys.d")
    public, secret = (part.decode() for part in zmq.curve_keypair())
    shown = f'role = "{role}"\npublic_key = "{public}"\n'
    _write_private(folder / f"{name}.key", f'{shown}secret_key = "{secret}"\n')
    _write_private(folder / "keys.d" / f"{name}.pub", shown)
    return Keys(name, role, public, secret, folder)


def load_keys(folder: Path, name: str) -> Keys:
    """Read this machine's own pair.

    Raises:
        KeyFault: missing, malformed, or readable by others.
    """
    path = folder / f"{name}.key"
    table = _read_private(path)
    role, public, secret = (table.get(key, "") for key in ("role", "public_key", "secret_key"))
    _check_name_and_role(name, role)
    if not (_Z85.fullmatch(public) and _Z85.fullmatch(secret)):
        raise KeyFault(f"{path}: expected public_key and secret_key of 40 Z85 characters each")
    return Keys(name, role, public, secret, folder)


def list_keys(folder: Path) -> list[Listed]:
    """Everybody on the allow-list, by name.

    Raises:
        KeyFault: an entry is malformed, or readable by others.
    """
    return [_read_listed(path) for path in sorted((folder / "keys.d").glob("*.pub"))]


def revoke_keys(folder: Path, name: str) -> None:
    """Take a name off the allow-list; its own pair stays where it is.

    Raises:
        KeyFault: not on the list.
    """
    _check_name_and_role(name, ROLES[0])
    try:
        (folder / "keys.d" / f"{name}.pub").unlink()
    except FileNotFoundError:
        raise KeyFault(f"keys: expected a name on the allow-list, got {name!r}") from None


def server_key(folder: Path, name: str = "coordinator") -> str:
    """Public key of a listed peer, for connecting to it.

    Raises:
        KeyFault: not on the list; copy its `.pub` file into `keys.d`.
    """
    return _read_listed(folder / "keys.d" / f"{name}.pub").public_key


class AllowList:
    """The entries of `keys.d`, read again when the folder changes. Safe in several threads."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder / "keys.d"
        self._clock = clock
        self._lock = threading.Lock()
        self._checked_at = float("-inf")
        self._signature: tuple[tuple[str, int, int], ...] = ()
        self._by_key: dict[str, Listed] = {}
        self._user_ids: frozenset[str] = frozenset()

    def find(self, public_key: str) -> Listed | None:
        """Who has this key; always looks at the folder, since it is asked once a connection."""
        self._refresh(0.0)
        return self._by_key.get(public_key)

    def role_of(self, user_id: str) -> str:
        """Role behind a message's User-Id; "" when the entry is gone or changed."""
        self._refresh(RELOAD_S)
        return user_id.partition("/")[0] if user_id in self._user_ids else ""

    def _refresh(self, max_age_s: float) -> None:
        now = self._clock()
        with self._lock:
            if now - self._checked_at < max_age_s:
                return
            self._checked_at = now
            signature = self._look()
            if signature != self._signature:
                self._signature = signature
                entries = [entry for path in sorted(self._paths()) if (entry := _try_read(path))]
                self._by_key = {entry.public_key: entry for entry in entries}
                self._user_ids = frozenset(entry.user_id for entry in entries)

    def _paths(self) -> list[Path]:
        return list(self._folder.glob("*.pub"))

    def _look(self) -> tuple[tuple[str, int, int], ...]:
        found = []
        for path in self._paths():
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # removed between listing and looking
            found.append((path.name, status.st_mtime_ns, status.st_ino))
        return tuple(sorted(found))


class Authenticator:
    """The ZAP handler of one context: a thread that answers who may connect.

    Start it before a CURVE socket binds. A key that is not listed, and any mechanism but CURVE,
    is refused; the listed key's `role/name` becomes the User-Id of its messages.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", allowed: AllowList) -> None:
        self._allowed = allowed
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ADDRESS)
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="zap", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; new CURVE connections are refused from here on."""
        self._is_ending.set()
        self._thread.join(timeout=5 * POLL_MS / 1000)

    def _serve(self) -> None:
        with self._socket:
            while not self._is_ending.is_set():
                if self._socket.poll(POLL_MS):
                    self._socket.send_multipart(self._answer(self._socket.recv_multipart()))

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """One request of RFC 27: version, id, domain, address, identity, mechanism, credentials."""
        version, request_id, address = request[0], request[1], request[3]
        entry = None
        if request[5] == b"CURVE" and len(request) == 7:
            entry = self._allowed.find(z85.encode(request[6]).decode())
        if entry is None:
            logger.warning("refused a connection from %s: its key is not listed", address.decode())
            return [version, request_id, b"400", b"key not listed", b"", b""]
        logger.info("accepted %s from %s", entry.user_id, address.decode())
        return [version, request_id, b"200", b"OK", entry.user_id.encode(), b""]


def _check_name_and_role(name: str, role: object) -> None:
    if not _NAME.fullmatch(name):
        raise KeyFault(f"key name: expected letters, digits and ._- (at most 63), got {name!r}")
    if role not in ROLES:
        raise KeyFault(f"role of key {name!r}: expected one of {', '.join(ROLES)}, got {role!r}")


def _make_private_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o077:
        raise KeyFault(f"{folder}: expected mode 0700, got {mode:04o}; run chmod 700")


def _write_private(path: Path, content: str) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise KeyFault(f"{path}: expected a new name, got one that exists; revoke it") from None
    with os.fdopen(handle, "w") as file:
        file.write(content)


def _read_private(path: Path) -> dict[str, str]:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise KeyFault(f"{path}: expected a key file, got nothing; make one: keys new") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as fault:
        raise KeyFault(f"{path}: expected TOML, got {fault}") from fault
    if mode & 0o077:
        raise KeyFault(f"{path}: expected mode 0600, got {mode:04o}; run chmod 600")
    return {key: value for key, value in table.items() if isinstance(value, str)}


def _read_listed(path: Path) -> Listed:
    table = _read_private(path)
    name, role, public = path.stem, table.get("role", ""), table.get("public_key", "")
    _check_name_and_role(name, role)
    if not _Z85.fullmatch(public):
        raise KeyFault(f"{path}: expected public_key of 40 Z85 characters, got {public!r:.60}")
    return Listed(name, role, public)


def _try_read(path: Path) -> Listed | None:
    try:
        return _read_listed(path)
    except KeyFault as fault:
        logger.warning("left out of the allow-list: %s", fault)
        return None
