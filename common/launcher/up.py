"""`dflash-up up` in the foreground and in the background, and `down`.

Owns how a run is begun and ended from a terminal. Does not know how processes are kept.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import click
import psutil

from common.config import Resolved, as_tables, environment
from common.errors import AddressInUse, DFlashError, NotReady, PeerError
from common.launcher.launch import launched, signals_to
from common.launcher.logs import POLL_S, LogReader
from common.launcher.orders import ask
from common.launcher.plan import TARGET, check_models, python_environ
from common.launcher.processes import error_of, last_error_line
from common.launcher.rundir import LAUNCHER_NAME, LOGS_DIR, claim, running_launcher
from common.launcher.status import Row
from common.launcher.supervisor import STARTING, Supervisor
from common.launcher.view import StartupView
from common.sdk.locate import run_dir_of

LOOK_S: Final = 0.1
ANSWER_S: Final = 20.0  # from the start of a background launcher to its first answer
STOP_EXTRA_S: Final = 20.0  # beyond the grace, until `down` kills


async def run_foreground(resolved: Resolved, roles: tuple[str, ...]) -> int:
    """Start everything and stay until a signal or `down`; returns the exit code."""
    view = StartupView()
    async with launched(resolved, roles, view) as (supervisor, run, run_dir):
        with signals_to([supervisor]):
            follower = asyncio.create_task(_print_logs(supervisor, run_dir.path))
            try:
                return await run
            finally:
                follower.cancel()


def start_background(resolved: Resolved, roles: tuple[str, ...], wait_s: float | None) -> None:
    """Start a launcher that outlives this command.

    Args:
        resolved: its configuration.
        roles: which processes.
        wait_s: how long to wait until all are ready; None: until the launcher answers.

    Raises:
        AddressInUse: a system of this name runs already.
        NotReady: not ready in time; nothing is left running.
        DFlashError: it ended; the type and the sentence are its own.
    """
    if TARGET in roles:
        check_models(resolved.config)
    run_dir = run_dir_of(resolved.config, environment())
    if (owner := running_launcher(run_dir)) is not None:
        raise AddressInUse(
            f"run {resolved.config.run.name!r} is up already (pid {owner.pid}); "
            "use another --name or `dflash-up down`"
        )
    process = _spawn_daemon(resolved, roles, run_dir)
    view = StartupView()
    limit = time.monotonic() + (ANSWER_S if wait_s is None else wait_s)
    while not _is_up(process, run_dir, view, all_ready=wait_s is not None):
        if time.monotonic() > limit:
            stop(run_dir, 0.0)
            raise NotReady(f"not ready in {wait_s or ANSWER_S:g} s; see `dflash-up logs`")
        time.sleep(LOOK_S)


def stop(run_dir: Path, grace_s: float) -> bool:
    """End the run of a folder, whoever still lives, and clear it; False: nothing was there."""
    launcher = running_launcher(run_dir)
    if launcher is None:
        if not run_dir.exists():
            return False
        claim(run_dir).release()
        return True
    with contextlib.suppress(DFlashError):
        ask(run_dir, "down")
    with contextlib.suppress(psutil.Error):
        try:
            launcher.wait(grace_s + STOP_EXTRA_S)
        except psutil.TimeoutExpired:
            launcher.kill()
            launcher.wait(STOP_EXTRA_S)
    if run_dir.exists():
        with contextlib.suppress(AddressInUse):  # the next run has begun already
            claim(run_dir).release()
    return True


def _spawn_daemon(
    resolved: Resolved, roles: tuple[str, ...], run_dir: Path
) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        # The folder is for people who look at a list of processes.
        [sys.executable, "-P", "-m", "common.launcher.daemon", str(run_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**environment(), **python_environ()},
        start_new_session=True,
        text=True,
    )
    body = {
        "tables": as_tables(resolved.config),
        "origins": dict(resolved.origins),
        "roles": list(roles),
    }
    if process.stdin is not None:
        process.stdin.write(json.dumps(body))
        process.stdin.close()
    return process


def _is_up(
    process: "subprocess.Popen[str]", run_dir: Path, view: StartupView, *, all_ready: bool
) -> bool:
    if process.poll() is not None:
        with process:
            early = process.stderr.read().strip() if process.stderr is not None else ""
        sentence = early or last_error_line(run_dir / LOGS_DIR / f"{LAUNCHER_NAME}.log")
        sentence = sentence.removeprefix("dflash-up: ")
        raise error_of(process.returncode, sentence or f"exit {process.returncode}")
    try:
        snapshot = ask(run_dir, "ps")
    except PeerError:
        return False
    except NotReady:
        return False
    rows = [Row(**row) for row in snapshot["processes"]]
    if not all_ready:
        return any(row.state == "ready" for row in rows)  # the coordinator listens
    view(rows, snapshot)
    return _all_ready(snapshot, rows)


def _all_ready(snapshot: dict[str, Any], rows: list[Row]) -> bool:
    if snapshot["state"] == "draining":
        return False  # it ends by itself; its exit code says why
    for row in rows:
        if row.state == "given up":
            raise DFlashError(f"{row.name} was given up: {row.last_error}; the others still run")
    return bool(rows) and snapshot["state"] == "ready" and _nobody_starts(rows)


def _nobody_starts(rows: list[Row]) -> bool:
    return all(row.state not in STARTING for row in rows)


async def _print_logs(supervisor: Supervisor, run_dir: Path) -> None:
    """After the start-up, show what the processes log."""
    if not await supervisor.wait_until_settled():
        return
    reader = LogReader(run_dir)
    reader.skip()
    while True:
        await asyncio.sleep(POLL_S)
        for line in reader.read():
            click.echo(line)
