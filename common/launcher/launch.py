"""One run inside this process: folder, supervisor, order socket and signals, up and down.

Owns how they are put together, for `up`, and for the private systems of `generate`, `bench` and
`demo`. Does not know the command line.
Invariant: leaving `launched` leaves no process, socket or file (after a failure: the logs).
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from common.config import Resolved, environment
from common.errors import PeerError
from common.launcher.coordinator_link import AdminLink
from common.launcher.orders import serve_orders
from common.launcher.plan import ROLES, TARGET, check_models, plan
from common.launcher.rundir import RunDir, claim
from common.launcher.status import Row
from common.launcher.supervisor import Supervisor
from common.net.transport import CONTROL_SOCKET, Endpoint
from common.net.zeromq import AsyncRouter
from common.sdk.locate import LAUNCHER_SOCKET, Address, ipc, run_dir_of
from common.settings import HttpConfig

T = TypeVar("T")
OnRows = Callable[[list[Row], Mapping[str, Any]], None]


def ignore_rows(rows: list[Row], status: Mapping[str, Any]) -> None:
    """An observer that looks away."""


@contextlib.asynccontextmanager
async def launched(
    resolved: Resolved,
    roles: tuple[str, ...] = ROLES,
    on_rows: OnRows = ignore_rows,
    *,
    keep_logs: bool = True,
) -> AsyncIterator[tuple[Supervisor, "asyncio.Task[int]", RunDir]]:
    """Start a run; yields its supervisor, the task whose result is the exit code, its folder.

    With `keep_logs` a run that failed leaves its logs for `dflash-up logs`.

    Raises:
        AddressInUse: another launcher holds the run.
        ConfigError: a path of the configuration is wrong.
    """
    config = resolved.config
    if TARGET in roles:
        check_models(config)
    run_dir = claim(run_dir_of(config, environment()))
    failed = True
    try:
        resolved.save_resolved(run_dir.path)
        link = AdminLink(lambda: Address(Endpoint(ipc(run_dir.path / CONTROL_SOCKET))))
        specs = plan(config, run_dir.path, roles)
        supervisor = Supervisor(config, run_dir, specs, link, on_rows)
        router = AsyncRouter()
        router.bind(ipc(run_dir.path / LAUNCHER_SOCKET))
        orders = asyncio.create_task(serve_orders(router, supervisor))
        run = asyncio.create_task(supervisor.run())
        try:
            yield supervisor, run, run_dir
        finally:
            supervisor.end()
            await asyncio.wait((run,))
            orders.cancel()
            await asyncio.gather(orders, return_exceptions=True)
            router.close()
            link.close()
            failed = run.cancelled() or run.exception() is not None
    finally:
        run_dir.release(keep_logs=failed and keep_logs)


@contextlib.contextmanager
def signals_to(supervisors: Iterable[Supervisor]) -> Iterator[None]:
    """Lead SIGINT and SIGTERM to the supervisors while the block runs."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def hand_on(number: int) -> None:
        for supervisor in supervisors:
            supervisor.on_signal(number)

    for number in numbers:
        loop.add_signal_handler(number, hand_on, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def with_systems(
    plans: Sequence[Resolved],
    work: Callable[[list[Path]], T],
    make_view: Callable[[], OnRows] = lambda: ignore_rows,
) -> T | None:
    """Start private systems one after the other, do blocking work in a thread, stop them.

    Args:
        plans: their configurations; the names must be free.
        work: called with the run folders once every process is ready.
        make_view: makes an observer of each start-up.

    Returns:
        What `work` returned, or None when a signal came first.

    Raises:
        DFlashError: a system did not start or broke, or `work` failed.
    """
    supervisors: list[Supervisor] = []
    runs: list[asyncio.Task[int]] = []
    folders: list[Path] = []
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(signals_to(supervisors))
        for resolved in plans:
            started = launched(resolved, on_rows=make_view(), keep_logs=False)
            supervisor, run, run_dir = await stack.enter_async_context(started)
            supervisors.append(supervisor)
            runs.append(run)
            folders.append(run_dir.path)
            if not await supervisor.wait_until_settled():
                await run
                return None
        try:
            return await asyncio.to_thread(work, folders)
        except PeerError:
            if any(supervisor.n_signals for supervisor in supervisors):
                return None
            for run in runs:
                if run.done():
                    await run  # raises the reason
            raise


def private(resolved: Resolved, purpose: str, **changes: Any) -> Resolved:
    """The same configuration under a name of its own, so that it meets no other run."""
    run = replace(resolved.config.run, name=f"{purpose}-{os.getpid()}", run_dir="", grace_s=0.0)
    config = replace(resolved.config, run=run, http=HttpConfig(), **changes)
    return Resolved(config, resolved.origins)
