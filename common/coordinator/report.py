"""The answer to `Status`: one JSON object about workers and requests.

Owns its keys, which `ps` and the start-up view read. Changes nothing.
"""

import json
from collections.abc import Mapping
from typing import Any

from common.coordinator.registry import Registry, Worker
from common.coordinator.requests import Requests

Report = dict[str, Any]


def status_body(
    registry: Registry,
    requests: Requests,
    ended: Mapping[str, int],
    now: float,
    *,
    is_draining: bool,
) -> str:
    """The whole report; `ended` counts requests by result, `now` is in monotonic seconds."""
    workers = [_worker(worker, now) for worker in registry]
    state = "ready" if registry.may_serve(now) else "starting"
    n_waiting = requests.n_waiting
    body: Report = {
        "state": "draining" if is_draining else state,
        "workers": workers,
        "requests": {"running": len(requests) - n_waiting, "queued": n_waiting},
        "counters": dict(ended),
    }
    return json.dumps(body)


def _worker(worker: Worker, now: float) -> Report:
    ready, beat, hello = worker.ready, worker.beat, worker.hello
    return {
        "name": worker.name,
        "role": worker.role,
        "pid": hello.pid,
        "build": hello.build,
        "model": _model(worker),
        "state": _state(worker, now),
        "phase": worker.progress.phase if ready is None else "",
        "done": worker.progress.done,
        "note": worker.progress.note,
        "device": ready.device if ready else "",
        "notes": dict(ready.notes) if ready else {},
        "ladder_ms": [round(ms, 3) for ms in ready.ladder_ms] if ready else [],
        "plain_ms": round(worker.costs.plain_ms, 3) if worker.costs else 0.0,
        "sessions": len(worker.sessions),
        "held": beat.sessions if beat else 0,  # sessions by the worker's own count
        "capacity": ready.capacity if ready else 0,
        "rss_bytes": beat.rss_bytes if beat else 0,
        "counters": dict(beat.counters) if beat else {},
        "age_ms": round((now - worker.liveness.heard_at) * 1e3, 1),
        "uptime_s": round(now - worker.since, 1),
    }


def _model(worker: Worker) -> Report:
    card = worker.hello.card
    if card is None:
        return {}
    sizes = {"vocab_size": card.vocab_size, "context_len": card.context_len}
    return {"model_type": card.model_type, **sizes, "block_size": card.block_size}


def _state(worker: Worker, now: float) -> str:
    if worker.ready is None:
        return "starting"
    if worker.is_draining:
        return "draining"
    return "busy" if worker.sessions or worker.is_quarantined(now) else "ready"
