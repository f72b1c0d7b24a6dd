"""Where a running system is found: its run folder, the sockets in it, or a tcp endpoint.

Owns the names of a run folder and the choice of endpoint and keys. Does not know who listens.
"""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from common.config import environment, load
from common.errors import ConfigError, PeerLost
from common.net.auth import Keys, load_keys, server_key
from common.net.sockets import is_listening
from common.net.transport import CONTROL_SOCKET, Endpoint
from common.settings import Config

LAUNCHER_SOCKET: Final = "launcher.sock"
MAX_NAME_CHARS: Final = 40


@dataclass(frozen=True, slots=True)
class Address:
    """Where to connect, and with which keys; ipc needs none."""

    endpoint: Endpoint
    keys: Keys | None = None

    def may_answer(self) -> bool:
        """Whether somebody could be there: over ipc, whether the socket is listened on."""
        scheme, _, path = self.endpoint.address.partition("://")
        return scheme != "ipc" or is_listening(Path(path))


def run_dir_of(config: Config, environ: Mapping[str, str]) -> Path:
    """Folder of a run: as configured, else by name under XDG_RUNTIME_DIR or a per-user folder.

    Raises:
        ConfigError: a name that cannot be a folder's.
    """
    if config.run.run_dir:
        return Path(config.run.run_dir).expanduser().absolute()
    name = config.run.name
    letters_ok = all(letter.isalnum() or letter in "-_." for letter in name)
    if not letters_ok or not 0 < len(name) <= MAX_NAME_CHARS or name.startswith("."):
        raise ConfigError(
            f"run.name: {name!r}; use 1 to {MAX_NAME_CHARS} letters, digits, '-', '_' or '.'"
        )
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "dflash-up" / name
    return Path(tempfile.gettempdir()) / f"dflash-up-{os.getuid()}" / name


def locate(
    name: str | None = None,
    run_dir: Path | None = None,
    file: Path | None = None,
    endpoint: str | None = None,
    role: str = "client",
) -> Address:
    """The coordinator of a running system.

    Args:
        name: of the run; None: what the environment says, else `default`.
        run_dir: a run folder instead of a name.
        file: a configuration whose `net.control` is used when no such run is on this machine.
        endpoint: an explicit address instead of all that.
        role: names the key pair for tcp, unless `keys.name` does.

    Raises:
        PeerLost: no such system runs here, and no tcp endpoint is configured.
        KeyFault: the keys for tcp are missing.
    """
    if endpoint is not None and endpoint.startswith("ipc://"):
        return Address(Endpoint(endpoint))
    environ = environment()
    flags = {"run.name": name, "run.run_dir": run_dir and str(run_dir), "net.control": endpoint}
    config = load(file, flags, environ).config
    folder = run_dir_of(config, environ)
    if endpoint is None and is_listening(folder / CONTROL_SOCKET):
        return Address(Endpoint(ipc(folder / CONTROL_SOCKET)))
    if not config.net.control:
        raise PeerLost(
            f"no system named {config.run.name!r} runs here ({folder}); "
            "start one with `dflash-up up`"
        )
    keys = load_keys(config.keys.folder, config.keys.name or role)
    return Address(Endpoint(config.net.control, server_key(config.keys.folder)), keys)


def ipc(path: Path) -> str:
    """The ZeroMQ address of a socket file."""
    return f"ipc://{path}"
