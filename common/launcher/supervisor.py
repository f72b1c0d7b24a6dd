"""Keep the processes of one run: start in order, restart, add, retire, stop.

Owns the children and how the run ends. Does not know sockets (`coordinator_link`, `orders`) or what
an operator sees (`view`): it hands out rows.
Invariant: when `run` returns, no child is left.
"""

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from common.errors import DFlashError, NotReady
from common.gateway.listen import is_ready
from common.launcher.coordinator_link import CoordinatorLink
from common.launcher.plan import COORDINATOR, GATEWAY, TARGET, ProcessSpec, make_spec, place_of
from common.launcher.processes import FINAL_CODES, KILL_AFTER_S, Child, describe_exit, error_of
from common.launcher.rundir import LAUNCHER_NAME, ProcessId, RunDir
from common.launcher.status import Row, join
from common.settings import Config

POLL_STARTING_S: Final = 0.1
POLL_RUNNING_S: Final = 1.0
STARTING: Final = ("waiting", "starting")
UP: Final = ("ready", "busy")


class Supervisor:
    """All processes of one run."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        specs: list[ProcessSpec],
        link: CoordinatorLink,
        on_rows: Callable[[list[Row], Mapping[str, Any]], None],
    ) -> None:
        self.config = config
        self._run_dir = run_dir
        self._link = link
        self._on_rows = on_rows
        self._children = {spec.name: Child(spec, run_dir.logs) for spec in specs}
        self._has_coordinator = COORDINATOR in self._children
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._settled = asyncio.Event()  # nobody is starting any more
        self._end: asyncio.Future[DFlashError | None] = asyncio.get_running_loop().create_future()
        self.changing = asyncio.Lock()  # one scale, restart or drain at a time
        self._status: Mapping[str, Any] = {}
        self.n_signals = 0
        self._forced_code = 0
        # A target has been ready once; workers of a coordinator elsewhere never hold up the start.
        self.is_serving = not self._has_coordinator

    # ------------------------------------------------------------------ the run

    async def run(self) -> int:
        """Start everything, keep it until it is asked to end, stop everything.

        Returns:
            0 after an orderly end, 130 or 143 after a second signal.

        Raises:
            DFlashError: the run could not start or broke.
        """
        watcher = asyncio.get_running_loop().create_task(self._watch())
        try:
            await self._start_all()
            error = await asyncio.shield(self._end)
        finally:
            watcher.cancel()
            await self._stop_all()
        if self._forced_code:
            return self._forced_code
        if error is not None:
            raise error
        return 0

    async def wait_until_settled(self) -> bool:
        """Wait until every process is ready or given up; False: the run ends instead."""
        settled = asyncio.ensure_future(self._settled.wait())
        await asyncio.wait((settled, self._end), return_when=asyncio.FIRST_COMPLETED)
        settled.cancel()
        return not self._end.done()

    def end(self, error: DFlashError | None = None) -> None:
        """Ask the run to end; the first reason wins."""
        if not self._end.done():
            self._end.set_result(error)

    def on_signal(self, number: int) -> None:
        """The first signal drains, the second terminates at once."""
        self.n_signals += 1
        self.end()
        if self.n_signals > 1:
            self._forced_code = 128 + number
            for child in self._children.values():
                child.signal(signal.SIGKILL)

    async def _start_all(self) -> None:
        """The coordinator first, then all workers: they load at the same time."""
        for child in self._children.values():
            if self._end.done():
                return
            self._keep(child)
            if child.spec.role == COORDINATOR:
                await self._wait_for_coordinator(child)

    async def _wait_for_coordinator(self, child: Child) -> None:
        limit = time.monotonic() + child.spec.ready_timeout_s
        while not self._end.done() and await self._link.status() is None:
            if time.monotonic() > limit:
                self.end(NotReady(f"coordinator: no answer in {child.spec.ready_timeout_s:g} s"))
            await asyncio.sleep(POLL_STARTING_S)
        child.state = "ready"

    async def _stop_all(self) -> None:
        """The coordinator first: it lets requests finish and says goodbye to the workers."""
        for child in self._children.values():
            child.is_retiring = True
        coordinator = self._children.get(COORDINATOR)
        if coordinator is not None:
            await coordinator.stop(self.config.run.grace_s + KILL_AFTER_S)
        await asyncio.gather(*(child.stop() for child in self._children.values()))
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)

    # ------------------------------------------------------------------ one child

    def _keep(self, child: Child) -> None:
        name = child.spec.name
        self._keepers[name] = asyncio.get_running_loop().create_task(self._keeper(child))

    async def _keeper(self, child: Child) -> None:
        """Start a child again and again, until its end is wanted or it is given up."""
        while child.is_wanted():
            await child.start()
            self._write_pids()
            if not self._has_coordinator:  # nobody here can say that it is ready
                child.state = "ready"
            status = await child.wait()
            lived_s = time.monotonic() - child.started_s
            if not child.is_wanted():
                break
            was_ready = child.state == "ready"
            child.last_error = child.error_line() or describe_exit(status)
            reason = f"{describe_exit(status)}: {child.last_error}"
            if child.spec.role == COORDINATOR:
                self.end(error_of(status, f"coordinator ended ({reason})"))
                break
            await self._link.exited(child.spec.name, reason)
            is_final = status in FINAL_CODES and not (was_ready and self._has_coordinator)
            wait_s = None if is_final else child.record.on_death(lived_s, random.random())
            if wait_s is None:
                self._give_up(child, reason, status)
                break
            child.state = "waiting"
            child.n_restarts += 1
            await asyncio.sleep(wait_s)
        if child.state != "given up":
            child.state = "gone"
        self._write_pids()

    def _give_up(self, child: Child, reason: str, status: int) -> None:
        """A worker that cannot live ends a run that has not served yet, or has no target left."""
        child.state = "given up"
        others = [
            other
            for other in self._children.values()
            if other.spec.role == TARGET and other.state != "given up"
        ]
        if not self.is_serving or not others:
            self.end(error_of(status, f"{child.spec.name} ended ({reason})"))

    def _write_pids(self) -> None:
        alive = {
            name: child.id for name, child in self._children.items() if child.id and child.is_alive
        }
        self._run_dir.write_pids({LAUNCHER_NAME: ProcessId.of(os.getpid()), **alive})

    # ------------------------------------------------------------------ watching

    async def _watch(self) -> None:
        """Join what the coordinator says with what we see, again and again."""
        while True:
            if self._has_coordinator:
                self._status = await self._link.status() or {}
            self._look_at_gateway()
            rows = self.rows()
            for row in rows:
                child = self._children[row.name]
                if row.state in UP and child.state == "starting":
                    child.state = "ready"
                    self.is_serving = self.is_serving or child.spec.role == TARGET
                if child.state == "starting":
                    self._check_ready_time(child)
            self._on_rows(rows, self._status)
            is_settled = self.is_serving and all(row.state not in STARTING for row in rows)
            if is_settled:
                self._settled.set()
            await asyncio.sleep(POLL_RUNNING_S if is_settled else POLL_STARTING_S)

    def _look_at_gateway(self) -> None:
        """It is no worker, so the coordinator does not know it: it says itself that it listens."""
        child = self._children.get(GATEWAY)
        if child is not None and child.state == "starting" and child.is_alive and child.id:
            child.state = "ready" if is_ready(self._run_dir.path, child.id.pid) else "starting"

    def _check_ready_time(self, child: Child) -> None:
        limit_s = child.spec.ready_timeout_s
        if time.monotonic() - child.started_s <= limit_s or not child.is_alive:
            return
        child.last_error = f"not ready in {limit_s:g} s"
        if not self.is_serving:
            self.end(NotReady(f"{child.spec.name}: {child.last_error}; see its log"))
        child.signal(signal.SIGKILL)

    @property
    def children(self) -> list[Child]:
        """All children, in start order."""
        return list(self._children.values())

    def rows(self) -> list[Row]:
        """One row per process: ours and the coordinator's view of it."""
        return join(self.children, self._status, time.monotonic())

    def snapshot(self) -> dict[str, Any]:
        """What `ps` shows."""
        return {
            "name": self.config.run.name,
            "run_dir": str(self._run_dir.path),
            "state": self.state(),
            "processes": [row.as_json() for row in self.rows()],
            "requests": self._status.get("requests", {}),
            "counters": self._status.get("counters", {}),
        }

    def state(self) -> str:
        """The run in one word: starting, ready, degraded (somebody is missing) or draining."""
        if self._end.done():
            return "draining"
        if not self.is_serving:
            return "starting"
        return "ready" if all(row.state in UP for row in self.rows()) else "degraded"

    # ------------------------------------------------------------------ changes

    def add(self, role: str) -> str:
        """Start one more process of a role; returns its name."""
        place = "" if self._has_coordinator else place_of(self.config)
        specs = (
            make_spec(self.config, self._run_dir.path, role, index, place)
            for index in itertools.count(1)
        )
        spec = next(spec for spec in specs if spec.name not in self._children)
        self.start(spec)
        return spec.name

    def start(self, spec: ProcessSpec, n_restarts: int = 0) -> None:
        """Start and keep a process that is not of this run yet."""
        child = Child(spec, self._run_dir.logs)
        child.n_restarts = n_restarts
        self._children[spec.name] = child
        self._keep(child)

    async def retire(self, child: Child) -> None:
        """Drain one worker, end its process and forget it."""
        child.is_retiring = True
        if child.state == "ready" and child.spec.role != GATEWAY:
            child.state = "draining"
            await self._link.drain(child.spec.name, self.config.run.grace_s)
        await child.stop()
        keeper = self._keepers.pop(child.spec.name)
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        self._children.pop(child.spec.name, None)
        await self._link.exited(child.spec.name, "retired")
        self._write_pids()
