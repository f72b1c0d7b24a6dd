"""One row per process: what the operating system knows and what the coordinator knows, joined.

Owns the rows of `ps` and of the start-up view, and the reading of a Status. Does not know sockets.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from common.launcher.plan import ProcessSpec
from common.launcher.rundir import ProcessId


@dataclass(frozen=True, slots=True)
class Row:
    """One process of the run."""

    name: str
    role: str
    pid: int  # 0 while none runs
    state: str  # waiting | starting | ready | busy | draining | given up | gone
    uptime_s: float  # of the present life
    restarts: int
    phase: str = ""  # while starting: "load", "warm-up", "self-check"
    done: float = 0.0  # share of the phase, 0..1
    note: str = ""
    device: str = ""
    sessions: int = 0
    capacity: int = 0
    rss_bytes: int = 0
    age_ms: float = 0.0  # since it was last heard
    last_error: str = ""
    counters: Mapping[str, Any] = field(default_factory=dict)  # of the worker, since it started
    notes: Mapping[str, Any] = field(default_factory=dict)  # blas, threads, ..

    def as_json(self) -> dict[str, Any]:
        """The object that `ps --json` prints; its keys are stable."""
        return asdict(self)


class Watched(Protocol):
    """What a row needs of a child."""

    spec: ProcessSpec
    state: str
    id: ProcessId | None
    started_s: float
    n_restarts: int
    last_error: str

    @property
    def is_alive(self) -> bool:
        """Whether a process runs now."""
        ...


def join(children: Iterable[Watched], status: Mapping[str, Any], now: float) -> list[Row]:
    """Rows of all children; `now` in monotonic seconds."""
    heard = workers_of(status)
    return [_row(child, heard.get(child.spec.name, {}), now) for child in children]


def workers_of(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The workers of a Status by name."""
    return {worker["name"]: worker for worker in status.get("workers", [])}


def _row(child: Watched, heard: Mapping[str, Any], now: float) -> Row:
    pid = child.id.pid if child.id and child.is_alive else 0
    is_ours = not heard.get("pid") or heard["pid"] == pid  # not what its last life said
    said = heard if is_ours and pid else {}
    state = child.state
    if state in ("starting", "ready") and said.get("state"):
        state = str(said["state"])
    return Row(
        name=child.spec.name,
        role=child.spec.role,
        pid=pid,
        state=state,
        uptime_s=round(now - child.started_s, 1) if pid else 0.0,
        restarts=child.n_restarts,
        phase=str(said.get("phase", "")),
        done=float(said.get("done", 0.0)),
        note=str(said.get("note", "")),
        device=str(said.get("device", "")),
        sessions=int(said.get("sessions", 0)),
        capacity=int(said.get("capacity", 0)),
        rss_bytes=int(said.get("rss_bytes", 0)),
        age_ms=round(float(said.get("age_ms", 0.0)), 1),
        last_error=child.last_error,
        counters=dict(said.get("counters", {})),
        notes=dict(said.get("notes", {})),
    )
