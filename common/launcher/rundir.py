"""The run folder: private, claimed by one launcher at a time, removed on the way down.

Owns its files, the lock and the list of process ids. Does not know how processes are started.
Invariant: whoever holds the lock is the only launcher of the run; a process is signalled only if
its start time is the one that was written down, so a reused process id is never hit.
"""

import contextlib
import fcntl
import json
import os
import shutil
import stat
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import psutil

from common.errors import AddressInUse, ConfigError

PIDS_FILE: Final = "pids.json"
LOCK_FILE: Final = "lock"
LOGS_DIR: Final = "logs"
PARENT_PREFIX: Final = "dflash-up"  # of the folder that `run_dir_of` puts runs in
LAUNCHER_NAME: Final = "launcher"
MAX_SOCKET_BYTES: Final = 103 if sys.platform == "darwin" else 107
LONGEST_SOCKET: Final = "data-target.999.sock"
START_TIME_SLACK_S: Final = 0.05  # psutil rounds to clock ticks of 10 ms


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process, named so that a later owner of the same number is not mistaken for it."""

    pid: int
    created_s: float  # epoch seconds, as psutil reports them

    @classmethod
    def of(cls, pid: int) -> "ProcessId":
        """Name a process that is running now; a gone one gets the start time 0."""
        try:
            return cls(pid, psutil.Process(pid).create_time())
        except psutil.NoSuchProcess:
            return cls(pid, 0.0)

    def find(self) -> psutil.Process | None:
        """The running process, or None when it is gone or was replaced."""
        try:
            process = psutil.Process(self.pid)
            is_same = abs(process.create_time() - self.created_s) < START_TIME_SLACK_S
            return process if is_same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.Error:
            return None


class RunDir:
    """A run folder that this launcher has claimed."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.logs = path / LOGS_DIR
        self._lock = lock

    def write_pids(self, processes: dict[str, ProcessId]) -> None:
        """Replace the list of process ids in one step."""
        body = json.dumps({name: asdict(process) for name, process in processes.items()})
        draft = self.path / (PIDS_FILE + ".new")
        draft.write_text(body, encoding="utf-8")
        draft.replace(self.path / PIDS_FILE)

    def release(self, *, keep_logs: bool = False) -> None:
        """Remove what the run left here, the folder too; with `keep_logs` its logs stay."""
        _remove_contents(self.path, {LOGS_DIR} if keep_logs else set())
        os.close(self._lock)
        if keep_logs:
            return
        is_ours = self.path.parent.name.startswith(PARENT_PREFIX)
        for folder in (self.path, self.path.parent) if is_ours else (self.path,):
            with contextlib.suppress(OSError):  # not empty: another run lives beside it
                folder.rmdir()


def claim(path: Path) -> RunDir:
    """Make the folder, take its lock, end what a dead launcher left and clear it.

    Raises:
        AddressInUse: another launcher holds the run.
        ConfigError: the path is too long for a socket, or belongs to somebody else.
    """
    longest = len(os.fsencode(path / LONGEST_SOCKET))
    if longest > MAX_SOCKET_BYTES:
        raise ConfigError(
            f"run folder {path}: its sockets would have {longest} bytes, at most "
            f"{MAX_SOCKET_BYTES} work; choose a shorter run.run_dir or run.name"
        )
    while True:
        _make_private(path)
        lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise AddressInUse(
                f"run folder {path}: a launcher already runs here"
                f"{_launcher_pid_text(path)}; use another --name or `dflash-up down`"
            ) from None
        if _is_same_file(lock, path / LOCK_FILE):
            break
        os.close(lock)  # the last owner removed the folder between our open and our lock
    end_leftovers(path)
    _remove_contents(path, {LOCK_FILE})
    (path / LOGS_DIR).mkdir(mode=0o700)
    return RunDir(path, lock)


def read_pids(path: Path) -> dict[str, ProcessId]:
    """The process ids a launcher wrote down; empty when there are none."""
    try:
        body = json.loads((path / PIDS_FILE).read_text(encoding="utf-8"))
        return {name: ProcessId(**entry) for name, entry in body.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def running_launcher(path: Path) -> psutil.Process | None:
    """The launcher that serves this folder, or None when there is none."""
    entry = read_pids(path).get(LAUNCHER_NAME)
    return entry.find() if entry else None


def end_leftovers(path: Path, timeout_s: float = 5.0) -> list[str]:
    """Kill the processes that a dead launcher left; returns their names."""
    found = {name: process for name, entry in read_pids(path).items() if (process := entry.find())}
    found.pop(LAUNCHER_NAME, None)
    for process in found.values():
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(list(found.values()), timeout=timeout_s)
    return sorted(found)


def _make_private(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    facts = path.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise ConfigError(f"run folder {path}: it belongs to user {facts.st_uid}; choose another")
    path.chmod(0o700)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _launcher_pid_text(path: Path) -> str:
    process = running_launcher(path)
    return f" (pid {process.pid})" if process else ""


def _remove_contents(path: Path, kept: set[str]) -> None:
    for entry in path.iterdir():
        if entry.name in kept:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
