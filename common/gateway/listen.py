"""Where the gateway listens and whom it lets in.

Owns the form of `http.listen`, of the file of keys, and of the file that says that it listens. Does
not know HTTP or sockets.
"""

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from common.errors import ConfigError, KeyFault
from common.settings import HttpConfig

MIN_KEY_CHARS: Final = 16
READY_FILE: Final = "gateway.ready"  # in the run folder: the pid of who listens


@dataclass(frozen=True, slots=True)
class Listen:
    """An address."""

    host: str
    port: int  # 1..65535

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def listen_of(config: HttpConfig) -> Listen:
    """Read `http.listen`, "HOST:PORT" or "[V6]:PORT".

    Raises:
        ConfigError: another form, or an address beyond this machine without keys.
    """
    host, colon, port = config.listen.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"http.listen: {config.listen!r}; HOST:PORT is needed, 127.0.0.1:8080")
    listen = Listen(host.removeprefix("[").removesuffix("]"), int(port))
    if not listen.is_loopback and not config.key_file:
        raise ConfigError(
            f"http.listen: {config.listen!r} is reached from other machines; name a file of keys "
            "in http.key_file, or listen on 127.0.0.1"
        )
    return listen


def read_keys(config: HttpConfig) -> tuple[str, ...]:
    """The keys in `http.key_file`, one a line; without a file none.

    Raises:
        KeyFault: it cannot be read, others may read it, or a key is too short.
    """
    if not config.key_file:
        return ()
    path = Path(config.key_file).expanduser()
    try:
        if path.stat().st_mode & 0o077:
            raise KeyFault(f"http.key_file: {path} may be read by others; chmod 600 {path}")
        keys = tuple(filter(None, map(str.strip, path.read_text(encoding="utf-8").splitlines())))
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFault(f"http.key_file: {path}: {error}; give a readable file") from error
    if not keys or any(len(key) < MIN_KEY_CHARS for key in keys):
        form = f"keys of at least {MIN_KEY_CHARS} characters, one a line"
        raise KeyFault(f"http.key_file: {path} must hold {form}")
    return keys


def say_ready(run_dir: Path, pid: int) -> None:
    """Let the launcher know that process `pid` listens: it is no worker that could say so."""
    (run_dir / READY_FILE).write_text(f"{pid}\n", encoding="utf-8")


def is_ready(run_dir: Path, pid: int) -> bool:
    """Whether process `pid` has said that it listens."""
    try:
        return (run_dir / READY_FILE).read_text(encoding="utf-8").strip() == str(pid)
    except OSError:
        return False
