"""What the gateway counts, and what the system says of itself, as Prometheus text.

Owns metric names. Does not know routes.
"""

from collections.abc import Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from common.gateway.replies import Choice

#: Statistics of a reply that are summed up, and their meaning.
SUMMED: Final = {
    "rounds": "rounds of replies",
    "plain_rounds": "rounds that verified no draft",
    "drafts_sent": "drafts sent to a target",
    "drafts_accepted": "drafts a target accepted",
    "near_ties": "tokens decided by a near-tie",
}


class Meters:
    """The metrics of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            "dflash_http_requests",
            "requests by route and status",
            ("route", "status"),
            registry=registry,
        )
        self.running = Gauge("dflash_http_running", "requests being answered", registry=registry)
        self.seconds = Histogram(
            "dflash_http_seconds", "time to the end of a reply", ("route",), registry=registry
        )
        self._tokens = Counter("dflash_tokens", "tokens of replies", registry=registry)
        self._ttft = Histogram("dflash_ttft_seconds", "time to the first token", registry=registry)
        self._summed = {
            name: Counter(f"dflash_{name}", text, registry=registry)
            for name, text in SUMMED.items()
        }
        self._up = Gauge(
            "dflash_worker_up", "1 while a worker is ready", ("worker",), registry=registry
        )
        self._depth = Gauge(
            "dflash_requests_now", "requests at the coordinator", ("state",), registry=registry
        )

    def count(self, choice: Choice) -> None:
        """Add a finished completion."""
        stats = choice.completion.stats
        self._tokens.inc(choice.completion.n_tokens)
        self._ttft.observe(float(stats.get("ttft_s", 0.0)))
        for name, counter in self._summed.items():
            counter.inc(float(stats.get(name, 0)))

    def text(self, status: Mapping[str, Any]) -> bytes:
        """Everything, with the coordinator's present status; an empty one: it does not answer."""
        self._up.clear()
        for worker in status.get("workers", []):
            is_up = worker.get("state") in ("ready", "busy")
            self._up.labels(worker=worker["name"]).set(float(is_up))
        for state in ("running", "queued"):
            self._depth.labels(state=state).set(float(status.get("requests", {}).get(state, 0)))
        return generate_latest(self._registry)
