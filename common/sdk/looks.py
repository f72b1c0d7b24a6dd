"""What a look at a running system shows: health, models, statistics.

Owns how they are read out of a coordinator's Status. Does not know connections.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

UP: Final = ("ready", "busy")  # states of a worker that serves
TARGET: Final = "target"


@dataclass(frozen=True, slots=True)
class Health:
    """Whether requests are served, and by whom."""

    state: str  # of the system: "starting" | "ready" | "draining"
    n_running: int  # requests
    n_queued: int
    workers: Mapping[str, str]  # name -> state

    @property
    def is_ready(self) -> bool:
        """Whether a request that is sent now is served."""
        return self.state == "ready"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that ready targets serve."""

    model_type: str  # as its config says, "qwen4_exp"
    vocab_size: int
    context_len: int  # most tokens of prompt and reply
    targets: tuple[str, ...]  # who serves it


def health_of(status: Mapping[str, Any]) -> Health:
    """Health out of a Status."""
    requests = status.get("requests", {})
    return Health(
        state=str(status.get("state", "starting")),
        n_running=int(requests.get("running", 0)),
        n_queued=int(requests.get("queued", 0)),
        workers={worker["name"]: worker["state"] for worker in status.get("workers", [])},
    )


def models_of(status: Mapping[str, Any]) -> list[ModelInfo]:
    """Models of the ready targets, each once."""
    serving: dict[tuple[str, int, int], list[str]] = {}
    for worker in status.get("workers", []):
        model = worker.get("model")
        if worker.get("role") == TARGET and worker.get("state") in UP and model:
            key = model["model_type"], model["vocab_size"], model["context_len"]
            serving.setdefault(key, []).append(worker["name"])
    return [ModelInfo(*key, targets=tuple(names)) for key, names in serving.items()]


def stats_of(status: Mapping[str, Any]) -> dict[str, Any]:
    """Requests by how they ended, and every worker's own counters since it started."""
    workers = status.get("workers", [])
    return {
        "requests": dict(status.get("counters", {})),
        "workers": {worker["name"]: dict(worker.get("counters", {})) for worker in workers},
    }
