"""The coordinator as a process: sockets, timer and signals around the hub.

Owns the event loop, which addresses are bound and how the process ends. Does not decide anything:
messages and times go into `Coordinator`, what comes out is sent.
Invariant: a send that cannot be done at once means that the peer is lost; nothing is kept for it.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections import deque
from pathlib import Path
from typing import Final

from common.coordinator.hub import Coordinator, Outgoing
from common.errors import WireError
from common.net.auth import load_keys
from common.net.links import Lost, Received
from common.net.transport import CONTROL_SOCKET
from common.net.zeromq import AsyncRouter
from common.settings import Config
from common.wire.messages import Message

logger = logging.getLogger(__name__)

WORD_BYTES: Final = 16  # of a ticket: not to be guessed
LAST_WORDS_S: Final = 0.1  # for goodbyes to leave before the sockets close
LOOK_S: Final = 1.0  # how often the launcher is looked for
KEY_NAME: Final = "coordinator"


class Service:
    """Runs a coordinator until a signal, or until its launcher is gone.

    Args:
        config: of the run.
        run_dir: holds the control socket.
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._config = config
        self._run_dir = run_dir
        self._hub = Coordinator(
            config.coordinator, config.policy, lambda: secrets.token_hex(WORD_BYTES)
        )
        self._loop = asyncio.get_running_loop()
        self._router = AsyncRouter()
        self._keyed_from = 255  # number of the first socket whose peers have keys
        self._timer: asyncio.TimerHandle | None = None
        self._is_ended = asyncio.Event()
        self._reason = ""
        self._end_by: float | None = None
        self._fault: Exception | None = None
        self._parent_pid = os.getppid()

    async def run(self) -> None:
        """Serve until the end.

        Raises:
            AddressInUse, ConfigError, KeyFault: an address cannot be bound.
        """
        reader: asyncio.Task[None] | None = None
        try:
            self._bind()
            self._catch_signals()
            reader = self._loop.create_task(self._read())
            reader.add_done_callback(self._on_reader_done)
            self._look()
            await self._is_ended.wait()
            await self._say_goodbye()
            if self._fault is not None:
                raise self._fault
            if reader.done():
                reader.result()
        finally:
            if reader is not None:
                reader.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await reader
            if self._timer is not None:
                self._timer.cancel()
            self._router.close()

    def _bind(self) -> None:
        path = self._run_dir / CONTROL_SOCKET
        addresses = [self._router.bind(f"ipc://{path}")]
        config = self._config
        if config.net.control:
            self._keyed_from = len(addresses)
            keys = load_keys(config.keys.folder, config.keys.name or KEY_NAME)
            addresses.append(self._router.bind(config.net.control, keys))
        logger.info("listening on %s, policy %s", ", ".join(addresses), config.policy.mode)

    def _catch_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        """First: finish what runs, let nothing in. Second: leave now."""
        if self._end_by is not None:
            os._exit(128 + number)
        self._end_by = self._loop.time() + self._config.run.grace_s
        self._hub.is_draining = True
        self._reason = "stopped"
        self._end_when_idle()

    def _end_when_idle(self) -> None:
        if self._end_by is None or self._is_ended.is_set():
            return
        if not len(self._hub.requests) or self._loop.time() >= self._end_by:
            self._is_ended.set()

    def _look(self) -> None:
        """Look for the launcher, and at the end of the grace."""
        if os.getppid() != self._parent_pid:
            self._reason = "the launcher is gone"
            self._is_ended.set()
        self._end_when_idle()
        if not self._is_ended.is_set():
            self._loop.call_later(LOOK_S, self._look)

    def _on_reader_done(self, reader: asyncio.Task[None]) -> None:
        """A fault of our own ends the process rather than leaving it deaf."""
        self._reason = self._reason or "fault"
        self._is_ended.set()

    async def _read(self) -> None:
        while True:
            self._take(await self._router.recv())

    def _take(self, received: Received) -> None:
        now, peer = self._loop.time(), received.id.hex()
        key_role = received.role if received.id[0] >= self._keyed_from else None
        match received.body:
            case Lost():
                outgoing = self._hub.lost(peer, now)
            case WireError() as fault:
                outgoing = self._hub.bad(peer, fault, now)
            case message:
                outgoing = self._hub.handle(peer, message, now, key_role, received.key)
        self._send_all(outgoing)

    def _send_all(self, outgoing: list[Outgoing]) -> None:
        waiting = deque(outgoing)
        while waiting:
            peer, message = waiting.popleft()
            if not self._send(peer, message):
                waiting.extend(self._hub.lost(peer, self._loop.time()))
        self._end_when_idle()
        self._arm()

    def _send(self, peer: str, message: Message) -> bool:
        try:
            return self._router.send(bytes.fromhex(peer), message)
        except WireError:
            logger.exception("a message of our own could not be packed")
            return False

    def _arm(self) -> None:
        """Set the timer to the hub's next deadline."""
        if self._timer is not None:
            self._timer.cancel()
        due = self._hub.next_deadline()
        self._timer = None if due is None else self._loop.call_at(due, self._on_time)

    def _on_time(self) -> None:
        """Judge silence, but hear first what came while this process was not scheduled."""
        try:
            for received in self._router.take_waiting():
                self._take(received)
            self._send_all(self._hub.tick(self._loop.time()))
        except Exception as fault:  # noqa: BLE001  # else it passes unseen; it ends the process
            self._fault = fault
            self._reason = "fault"
            self._is_ended.set()

    async def _say_goodbye(self) -> None:
        logger.info("ending: %s", self._reason)
        for peer, message in self._hub.close(self._reason, self._loop.time()):
            self._send(peer, message)
        await asyncio.sleep(LAST_WORDS_S)


def serve(config: Config, run_dir: Path) -> None:
    """Run a coordinator in this process until it ends.

    Raises:
        AddressInUse, ConfigError, KeyFault: an address cannot be bound.
    """

    async def main() -> None:
        await Service(config, run_dir).run()

    asyncio.run(main())
