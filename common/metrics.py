"""Counters, gauges and histograms of one process, as Prometheus text.

Owns the table of names. Does not know who measures or who reads the text.
Invariant: a name that is not in `NAMES` cannot be recorded.
"""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

# name: (kind, meaning, labels)
NAMES: Final[dict[str, tuple[str, str, tuple[str, ...]]]] = {
    "dflash_requests": ("counter", "requests by how they ended", ("result",)),
    "dflash_tokens": ("counter", "tokens committed and sent to clients", ()),
    "dflash_rounds": ("counter", "rounds, drafted or plain", ("result",)),
    "dflash_draft_tokens": ("counter", "drafts sent to a target", ()),
    "dflash_accepted_tokens": ("counter", "drafts a target accepted", ()),
    "dflash_near_ties": ("counter", "tokens decided by a near-tie", ()),
    "dflash_stale": ("counter", "messages dropped because they named an old round", ()),
    "dflash_bad_messages": ("counter", "messages refused", ("peer", "kind")),
    "dflash_resumes": ("counter", "requests taken up again on another connection", ()),
    "dflash_worker_up": ("gauge", "1 while a worker is ready", ("worker",)),
    "dflash_queue_depth": ("gauge", "requests waiting", ()),
    "dflash_kept_replies": ("gauge", "replies kept after their end, for a late resume", ()),
    "dflash_round_seconds": ("histogram", "time by part of a round", ("part",)),
    "dflash_ttft_seconds": ("histogram", "time from submit to the first token", ()),
}
_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """The metrics of one process, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for name, (kind, text, labels) in NAMES.items():
            if kind == "counter":
                self._counters[name] = Counter(name, text, labels, registry=self._registry)
            elif kind == "gauge":
                self._gauges[name] = Gauge(name, text, labels, registry=self._registry)
            else:
                self._histograms[name] = Histogram(
                    name, text, labels, registry=self._registry, buckets=_BUCKETS
                )

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter."""
        counter = self._counters[name]
        (counter.labels(**labels) if labels else counter).inc(amount)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        gauge = self._gauges[name]
        (gauge.labels(**labels) if labels else gauge).set(value)

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Add one observation to a histogram."""
        histogram = self._histograms[name]
        (histogram.labels(**labels) if labels else histogram).observe(seconds)

    def text(self) -> str:
        """Everything in Prometheus text format."""
        return generate_latest(self._registry).decode()
