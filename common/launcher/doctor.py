"""`dflash-up doctor`: can this machine run the system, and how well?

Owns the checks and their verdicts. Does not repair anything. What needs MLX runs in a child, since
the launcher never loads it.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from common.config import environment
from common.errors import AddressInUse, DFlashError
from common.launcher.flags import config_options, resolve
from common.launcher.plan import COORDINATOR, TARGET, blas_threads, check_models, make_spec
from common.launcher.rundir import claim, running_launcher
from common.net.auth import list_keys, load_keys
from common.net.transport import Endpoint
from common.net.zeromq import AsyncClientLink, AsyncRouter
from common.sdk.locate import ipc, run_dir_of
from common.settings import Config
from common.wire.messages import StatusRequest

CHILD_S: Final = 120.0
ROUND_TRIPS: Final = 200
GOOD, ODD, BAD = "ok", "note", "FAIL"

# Runs where MLX may be loaded: OpenBLAS first, as in a service, then one product that is timed.
PROBE: Final = """
import json, time
from common.checkpoint.blas import load_openblas
report = load_openblas()
import mlx.core as mx
from common.checkpoint.device import choose_device
device = choose_device({device!r})
def best(rows):
    x, w = mx.ones((rows, 1024)), mx.ones((1024, 1024))
    mx.eval(x, w)
    times = []
    for _ in range(20):
        began = time.perf_counter()
        mx.eval(x @ w)
        times.append(time.perf_counter() - began)
    return min(times) * 1e3
print(json.dumps({{"mlx": mx.__version__, "device": device, "loaded": report.loaded,
                  "note": report.note, "ms_1": best(1), "ms_8": best(8)}}))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's verdict."""

    subject: str
    verdict: str  # GOOD | ODD | BAD
    text: str


@click.command("doctor")
@config_options
def command(**flags: Any) -> int:
    """Check checkpoints, BLAS, sockets and keys on this machine."""
    config = resolve(**flags).config
    checks: dict[str, Callable[[Config], Finding]] = {
        "python": check_python,
        "checkpoints": check_checkpoints,
        "mlx": check_mlx,
        "sockets": check_sockets,
        "keys": check_keys,
    }
    n_bad = 0
    for subject, check in checks.items():
        try:
            finding = check(config)
        except DFlashError as error:
            finding = Finding(subject, BAD, str(error))
        click.echo(f"{finding.verdict:<5} {finding.subject:<12} {finding.text}")
        n_bad += finding.verdict == BAD
    return 1 if n_bad else 0


def check_python(config: Config) -> Finding:
    """The interpreter is one that the package supports."""
    version = ".".join(map(str, sys.version_info[:3]))
    is_good = sys.version_info >= (3, 11)
    return Finding(
        "python", GOOD if is_good else BAD, f"{version} ({sys.executable}), at least 3.11"
    )


def check_checkpoints(config: Config) -> Finding:
    """The folders that the configuration names hold checkpoints."""
    check_models(config)
    paths = [str(config.model.target_path), str(config.drafter_path or "no drafter")]
    return Finding("checkpoints", GOOD, ", ".join(paths))


def check_mlx(config: Config) -> Finding:
    """MLX loads, and eight rows cost little more than one: else drafting cannot pay."""
    environ = make_spec(config, Path(), TARGET, 1).environ
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", PROBE.format(device=config.target.device)],
            env={**environment(), **environ},
            capture_output=True,
            text=True,
            timeout=CHILD_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding("mlx", BAD, f"no answer in {CHILD_S:g} s; is the machine overloaded?")
    if done.returncode:
        last = next(reversed(done.stderr.strip().splitlines()), f"exit {done.returncode}")
        return Finding("mlx", BAD, last)
    facts = json.loads(done.stdout)
    ratio = facts["ms_8"] / facts["ms_1"]
    text = (
        f"MLX {facts['mlx']} on {facts['device']}; {facts['note']}; "
        f"{blas_threads(config, TARGET)} BLAS threads; 8 rows cost {ratio:.1f} x one row"
    )
    return Finding("mlx", GOOD if ratio < 4 else ODD, text)


def check_sockets(config: Config) -> Finding:
    """The run folder takes sockets, and messages cross them quickly."""
    run_dir = run_dir_of(config, environment())
    if (launcher := running_launcher(run_dir)) is not None:
        return Finding("sockets", GOOD, f"{run_dir}: in use by launcher {launcher.pid}")
    try:
        claimed = claim(run_dir)
    except AddressInUse as error:
        return Finding("sockets", ODD, str(error))
    try:
        took_ms = asyncio.run(_round_trip_ms(ipc(run_dir / "doctor.sock")))
    finally:
        claimed.release()
    return Finding("sockets", GOOD, f"{run_dir}: private; a round trip takes {took_ms:.2f} ms")


def check_keys(config: Config) -> Finding:
    """Tcp endpoints have the keys they need."""
    folder = config.keys.folder
    if not (config.net.control or config.net.data):
        return Finding("keys", GOOD, "not needed: ipc only")
    entries = list_keys(folder)
    names = ", ".join(f"{entry.name} ({entry.role})" for entry in entries) or "nobody"
    if not any(entry.role == COORDINATOR for entry in entries):
        return Finding("keys", BAD, f"{folder}: no coordinator on the list; there is {names}")
    if config.keys.name:
        load_keys(folder, config.keys.name)
    return Finding("keys", GOOD, f"{folder}: {names}")


async def _round_trip_ms(address: str) -> float:
    router = AsyncRouter()
    router.bind(address)
    echo = asyncio.create_task(_echo(router))
    link = AsyncClientLink(Endpoint(address))
    try:
        await link.connect()
        times = []
        for _ in range(ROUND_TRIPS):
            began = time.perf_counter()
            link.send(StatusRequest(request="doctor"))
            await link.recv(1.0)
            times.append(time.perf_counter() - began)
        return statistics.median(times) * 1e3
    finally:
        echo.cancel()
        await asyncio.gather(echo, return_exceptions=True)
        link.close()
        router.close()


async def _echo(router: AsyncRouter) -> None:
    while True:
        received = await router.recv()
        if isinstance(received.body, StatusRequest):
            router.send(received.id, received.body)
