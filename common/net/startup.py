"""How a worker process gets from its command line to a connected shell.

Owns the choice between ipc and tcp, the target's data socket, and the first Hello.
Does not know models or actors. A worker says hello before it loads anything, so that loading can be
watched; it says hello again with its model card, and then Ready.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common import log
from common.config import load_resolved
from common.errors import ConfigError, DFlashError
from common.net.auth import Keys, load_keys, server_key
from common.net.transport import CONTROL_SOCKET, Endpoint
from common.net.worker import WorkerShell
from common.settings import Config
from common.wire.messages import Hello, ModelCard, Progress
from common.wire.version import MAJOR, MINOR, build

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Process:
    """What a worker's command line says, and the configuration of its run."""

    role: str  # "target" | "drafter"
    name: str  # "target.1"
    run_dir: Path
    config: Config


class Worker:
    """A connected worker that is still loading.

    Attributes:
        shell: the I/O side; give it the actor when everything is loaded.
        card: fingerprints of the loaded model; None until it is known.
    """

    def __init__(self, process: Process) -> None:
        self.process = process
        self.card: ModelCard | None = None
        config = process.config
        keys = _keys(config, process.role) if config.net.control or config.net.data else None
        self.shell = WorkerShell(
            role=process.role,
            name=process.name,
            control=control_endpoint(process.run_dir, config),
            hello=self._hello,
            keys=keys,
            data_bind=_data_bind(process) if process.role == "target" else None,
            heartbeat_ms=config.coordinator.heartbeat_ms,
            grace_s=config.run.grace_s,
            parent_pid=os.getppid(),
        )

    def progress(self, phase: str, done: float, note: str = "") -> None:
        """Tell the start-up view; leaves the process if the coordinator refused it meanwhile."""
        self.shell.report(Progress(phase, min(1.0, max(0.0, done)), note))
        self.shell.check()

    def introduce(self, card: ModelCard) -> None:
        """Say hello again, now with the fingerprints that pairing compares."""
        self.card = card
        self.shell.report(self._hello())
        self.shell.check()

    def _hello(self) -> Hello:
        process = self.process
        return Hello(process.role, process.name, MAJOR, MINOR, build(), os.getpid(), self.card)


def run_worker(role: str, run_dir: Path, name: str, serve: Callable[[Worker], int]) -> int:
    """Connect, call `serve`, and turn what it raises into a log line and an exit code.

    Args:
        role: "target" or "drafter".
        run_dir: folder with the resolved configuration.
        name: of this process, "target.1".
        serve: loads, introduces, and runs the actor; returns the exit code.
    """
    try:
        config = load_resolved(run_dir)
    except ConfigError as fault:
        log.set_up(name)
        logger.error("%s", fault)
        return fault.exit_code
    log.set_up(name, config.run.log_level, as_json=config.run.log_json)
    try:
        worker = Worker(Process(role, name, run_dir, config))
        with worker.shell:
            return serve(worker)
    except DFlashError as fault:
        logger.error("%s", fault)
        return fault.exit_code
    except Exception:  # the top of a process: log it with its trace, and say that it failed
        logger.exception("ended by a fault")
        return 1


def control_endpoint(run_dir: Path, config: Config) -> Endpoint:
    """The coordinator: its socket in the run folder, or tcp when it runs on another machine.

    Raises:
        KeyFault: tcp, and the coordinator's public key is not listed here.
    """
    socket = run_dir / CONTROL_SOCKET
    if config.net.control and not socket.exists():
        return Endpoint(config.net.control, server_key(config.keys.folder))
    return Endpoint(f"ipc://{socket}")


def _keys(config: Config, role: str) -> Keys:
    return load_keys(config.keys.folder, config.keys.name or role)


def _data_bind(process: Process) -> str:
    return process.config.net.data or f"ipc://{process.run_dir / f'data-{process.name}.sock'}"
