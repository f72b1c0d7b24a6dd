"""One child process: spawn, wait, stop; and what its log says about its end.

Owns the operating system's side of a child. Does not know why it is started or stopped.
Invariant: a child leads a process group of its own and dies with the launcher.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

from common.config import environment
from common.errors import (
    AddressInUse,
    ConfigError,
    DFlashError,
    KeyFault,
    ModelMismatch,
    NotReady,
)
from common.launcher.plan import COORDINATOR, ProcessSpec
from common.launcher.restart import RestartRecord
from common.launcher.rundir import ProcessId

WRAPPER: Final = Path(__file__).with_name("child.py")
KILL_AFTER_S: Final = 5.0  # from TERM to KILL
LOG_TAIL_BYTES: Final = 16_384
FINAL_CODES: Final[dict[int, type[DFlashError]]] = {  # exits that another try would repeat
    2: ConfigError,
    4: AddressInUse,
    5: ModelMismatch,
    6: KeyFault,
}


class Child:
    """One process of the plan, over all its lives."""

    def __init__(self, spec: ProcessSpec, logs: Path) -> None:
        self.spec = spec
        self.log_path = logs / f"{spec.name}.log"
        self._coordinator_log = logs / f"{COORDINATOR}.log"
        self.record = RestartRecord(spec.backoff_s, spec.restarts)
        self.state = "waiting"  # waiting | starting | ready | draining | given up | gone
        self.id: ProcessId | None = None
        self.started_s = 0.0  # monotonic, of the present life
        self.n_restarts = 0
        self.last_error = ""
        self.is_retiring = False  # its end is wanted: no restart, no WorkerExited
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Begin a life; output goes to the log file, which outlives us."""
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(WRAPPER), str(os.getpid()), *self.spec.argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**environment(), **self.spec.environ},
                start_new_session=True,
            )
        self.id = ProcessId.of(self._process.pid)
        self.started_s = time.monotonic()
        self.state = "starting"

    async def wait(self) -> int:
        """Wait for the end of the present life; the exit status, negative for a signal."""
        if self._process is None:
            raise RuntimeError(f"{self.spec.name} was not started")
        return await self._process.wait()

    @property
    def is_alive(self) -> bool:
        """Whether a process runs now."""
        return self._process is not None and self._process.returncode is None

    def is_wanted(self) -> bool:
        """Whether it should live: nobody asked for its end."""
        return not self.is_retiring

    def signal(self, number: int) -> None:
        """Signal the whole process group, if it still runs."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    async def stop(self, kill_after_s: float = KILL_AFTER_S) -> None:
        """End the process: TERM, then KILL."""
        self.is_retiring = True
        if not self.is_alive:
            return
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.wait(), kill_after_s)
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self.wait()

    def error_line(self) -> str:
        """Why it ended: its refusal by the coordinator, else what its own log says last."""
        sign = f"| warning {self.spec.name} refused: "
        refusals = [line for line in _tail(self._coordinator_log) if sign in line]
        if refusals:
            return refusals[-1].split(sign, 1)[1].strip()
        return last_error_line(self.log_path)


def last_error_line(path: Path) -> str:
    """The last error in a log file, with the end of its trace; else the last message."""
    lines = _tail(path)
    errors = [index for index, line in enumerate(lines) if "| error " in line]
    if not errors:
        return next(reversed(lines), "").rpartition("| ")[2].strip()
    sentence = lines[errors[-1]].split("| error ", 1)[1].strip()
    trace = lines[errors[-1] + 1 : errors[-1] + 2]
    has_trace = bool(trace) and trace[0].startswith("Traceback")
    return f"{sentence}: {lines[-1].strip()}" if has_trace else sentence


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [_as_text(line) for line in lines]


def _as_text(line: str) -> str:
    """A JSON log line in the shape of a text line, so that one search finds both."""
    if not line.startswith("{"):
        return line
    try:
        body = json.loads(line)
        return f"{body['name']} | {body['level']} {body['message']}"
    except (ValueError, KeyError):
        return line


def describe_exit(status: int) -> str:
    """An exit status in words: "exit 5" or "SIGKILL"."""
    if status >= 0:
        return f"exit {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def error_of(status: int, message: str) -> DFlashError:
    """The typed error behind a child's exit status; the run ends with the same code."""
    return (FINAL_CODES | {NotReady.exit_code: NotReady}).get(status, DFlashError)(message)
