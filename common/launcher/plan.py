"""From a configuration to processes: names, command lines, environments, start order.

Owns what is started and with which BLAS threads. Does not know how a process is watched.
"""

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from common.config import environment
from common.errors import ConfigError
from common.gateway.listen import listen_of, read_keys
from common.settings import Config

COORDINATOR: Final = "coordinator"
TARGET: Final = "target"
DRAFTER: Final = "drafter"
GATEWAY: Final = "gateway"
ROLES: Final = (COORDINATOR, TARGET, DRAFTER, GATEWAY)  # also the order of starting

MODULES: Final = {
    COORDINATOR: "common.coordinator",
    TARGET: "target_svc",
    DRAFTER: "drafter_svc",
    GATEWAY: "common.gateway",
}
ALONE: Final = (COORDINATOR, GATEWAY)  # one of each: they have no number
SOURCE_ROOT: Final = Path(__file__).resolve().parents[2]
# An idle OpenBLAS thread spins for 2^n clock ticks before it sleeps; the default, 2^26, holds a
# core for some 20 ms after every product, which is the other process's core: drafted rounds took
# 2 to 4 times as long with it (two cores, two threads each, measured).
BLAS_SPIN_EXPONENT: Final = 4


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to start and keep."""

    name: str  # "target.1"
    role: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]  # added to the launcher's own
    ready_timeout_s: float
    restarts: int | None  # None: always
    backoff_s: float


def check_models(config: Config) -> None:
    """Refuse checkpoint folders that do not exist, before anything is started.

    Raises:
        ConfigError: names the key, the path and what it must be.
    """
    paths = [("model.target", config.model.target_path)]
    if config.drafter.replicas and config.drafter_path:
        paths.append(("model.drafter", config.drafter_path))
    for key, path in paths:
        if not (path / "config.json").is_file():
            raise ConfigError(f"{key}: {path} is no checkpoint folder; it must hold config.json")


def replicas(config: Config, role: str) -> int:
    """How many processes of a role a configuration asks for."""
    if role == COORDINATOR:
        return 1
    if role == GATEWAY:
        return int(bool(config.http.listen))
    if role == TARGET:
        return config.target.replicas
    return config.drafter.replicas if config.drafter_path else 0


def plan(config: Config, run_dir: Path, roles: tuple[str, ...] = ROLES) -> list[ProcessSpec]:
    """All processes of a run in start order.

    Raises:
        ConfigError, KeyFault: the gateway is to listen where it must not, or its keys are no keys.
    """
    if GATEWAY in roles and config.http.listen:
        listen_of(config.http)
        read_keys(config.http)
    place = "" if COORDINATOR in roles else place_of(config)
    return [
        make_spec(config, run_dir, role, index, place)
        for role in ROLES
        if role in roles
        for index in range(1, replicas(config, role) + 1)
    ]


def place_of(config: Config) -> str:
    """What tells this machine's workers from others at a coordinator elsewhere: "@drafter-box"."""
    return f"@{config.keys.name or platform.node()}"


def make_spec(config: Config, run_dir: Path, role: str, index: int, place: str = "") -> ProcessSpec:
    """One process; `index` counts from 1 within its role, `place` makes its name unique."""
    name = role if role in ALONE else f"{role}.{index}{place}"
    argv = (
        sys.executable,
        "-P",  # a folder `common` where the user stands is not ours
        "-m",
        MODULES[role],
        "--run-dir",
        str(run_dir),
        "--name",
        name,
    )
    settings = config.target if role == TARGET else config.drafter
    return ProcessSpec(
        name=name,
        role=role,
        argv=argv,
        environ=_environ(config, role),
        ready_timeout_s=30.0 if role in ALONE else settings.ready_timeout_s,
        restarts={COORDINATOR: 0, TARGET: config.target.restarts}.get(role),
        backoff_s=settings.backoff_s,
    )


def blas_threads(config: Config, role: str, n_cores: int | None = None) -> int:
    """BLAS threads of one process: as configured, else half the cores over its role's replicas.

    Never more threads than cores: OpenBLAS waits for its slowest thread at every product, so one
    thread that shares a core makes a round of 24 ms last up to 430 ms (two cores, two threads
    each, measured); with one thread each, the rest of the machine costs 10 ms at the worst.
    """
    settings = config.target if role == TARGET else config.drafter
    if role in ALONE:
        return 1
    if settings.threads:
        return settings.threads
    cores = n_cores or len(_usable_cores())
    return max(1, cores // 2 // max(1, replicas(config, role)))


def python_environ() -> dict[str, str]:
    """What every Python child needs: to find our packages, and to write without delay."""
    path = os.pathsep.join(filter(None, (str(SOURCE_ROOT), environment().get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _environ(config: Config, role: str) -> dict[str, str]:
    return {
        **python_environ(),
        "OPENBLAS_NUM_THREADS": str(blas_threads(config, role)),
        "OPENBLAS_THREAD_TIMEOUT": str(BLAS_SPIN_EXPONENT),
    }


def _usable_cores() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))
