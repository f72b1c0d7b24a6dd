"""Where a running system is found: its run folder and the sockets in it.

Owns names inside a run folder. Does not know who made them or whether anybody listens.
"""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from common.config import Config, environment, load
from common.errors import ConfigError

CONTROL_SOCKET: Final = "control.sock"  # the coordinator's
LAUNCHER_SOCKET: Final = "launcher.sock"
MAX_NAME_CHARS: Final = 40


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


def run_dir_named(name: str | None) -> Path:
    """Folder of the run `name`; None: the name that the environment gives, else `default`."""
    environ = environment()
    return run_dir_of(load(None, {"run.name": name}, environ).config, environ)


def ipc(path: Path) -> str:
    """The ZeroMQ address of a socket file."""
    return f"ipc://{path}"
