"""Who works here: targets and drafters, their places, their clocks and their record.

Owns registrations, places (credits: a worker never holds more sessions than it said it can),
strikes, quarantine and draft times. Does not know requests beyond session names; times are passed
in. Invariant: all workers registered at one time fit each other's models.
"""

import logging
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from common.errors import ModelMismatch
from common.net.liveness import ALIVE, Liveness
from common.policy.calibration import Calibration, Prior
from common.policy.costs import TargetCosts
from common.sources import MTP
from common.wire.messages import Heartbeat, Hello, Progress, Ready
from common.wire.roles import TARGET
from common.wire.version import card_mismatch

logger = logging.getLogger(__name__)

MAX_STRIKES: Final = 3  # in a row, then quarantine
QUARANTINE_S: Final = 1.0  # doubles with every quarantine in a row
MAX_QUARANTINE_S: Final = 30.0
DRAFT_TIMES: Final = 64  # that p95 is taken from
PAST_S: Final = 0.001  # a clock is over its limit only after it, not at it
DEADLINE_FACTOR: Final = 3.0  # draft deadline over p95
MAX_DRAFT_DEADLINE_S: Final = 0.8  # a stopped or lying drafter may not make a round wait longer


@dataclass(slots=True)
class Worker:
    """One registered worker."""

    peer: str
    hello: Hello
    liveness: Liveness
    since: float
    ready: Ready | None = None
    costs: TargetCosts | None = None  # targets only
    progress: Progress = field(default_factory=lambda: Progress("start", 0.0))
    beat: Heartbeat | None = None
    sessions: set[str] = field(default_factory=set)
    is_draining: bool = False
    n_strikes: int = 0  # in a row
    n_quarantines: int = 0  # in a row
    quarantined_until: float = 0.0
    draft_ms: deque[float] = field(default_factory=lambda: deque(maxlen=DRAFT_TIMES))

    @property
    def name(self) -> str:
        """Such as "target.1"."""
        return self.hello.name

    @property
    def role(self) -> str:
        """TARGET or DRAFTER."""
        return self.hello.role

    @property
    def block_size(self) -> int:
        """B; 0 when no drafter is bound."""
        return self.hello.card.block_size if self.hello.card else 0

    @property
    def drafts_itself(self) -> bool:
        """Whether this target's own head drafts, as it said when it was ready."""
        return self.ready is not None and self.ready.notes.get("source") == MTP

    @property
    def copies(self) -> bool:
        """Whether this target's rounds may verify copies of earlier text."""
        return self.ready is not None and self.ready.notes.get("copies") is True

    @property
    def load(self) -> float:
        """Share of its places that is taken."""
        return len(self.sessions) / self.ready.capacity if self.ready else math.inf

    def is_quarantined(self, now: float) -> bool:
        """Whether it is left alone for its strikes."""
        return now < self.quarantined_until

    def has_room(self, now: float, budget_s: float) -> bool:
        """Whether it may be given one more session."""
        return (
            self.ready is not None
            and not self.is_draining
            and not self.is_quarantined(now)
            and len(self.sessions) < self.ready.capacity
            and self.liveness.verdict(now, budget_s) == ALIVE
        )


class Registry:
    """All workers.

    Args:
        silence_s: a worker unheard for so long is lost.
        budget_s: a worker whose compute thread got nowhere for so long is stuck.
        draft_deadline_s: least time a draft is waited for.
    """

    def __init__(self, silence_s: float, budget_s: float, draft_deadline_s: float) -> None:
        self._silence_s = silence_s
        self._budget_s = budget_s
        self._draft_deadline_s = draft_deadline_s
        self._workers: dict[str, Worker] = {}
        self._calibration = Calibration()

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def get(self, peer: str) -> Worker | None:
        """The worker behind a peer."""
        return self._workers.get(peer)

    def named(self, name: str) -> Worker | None:
        """The worker of a name; the latest registration where there are two."""
        found = [worker for worker in self._workers.values() if worker.name == name]
        return found[-1] if found else None

    def register(self, peer: str, hello: Hello, now: float) -> Worker:
        """Enter a worker, or renew the entry of one that says Hello again.

        Raises:
            ModelMismatch: its model does not fit a registered worker's; nothing changed.
        """
        for other in self._workers.values():
            if other.peer == peer or hello.card is None or other.hello.card is None:
                continue
            reason = card_mismatch(other.name, other.hello.card, hello.name, hello.card)
            if reason:
                raise ModelMismatch(reason)
        known = self._workers.get(peer)
        progress = known.progress if known else Progress("start", 0.0)
        liveness = Liveness(now, self._silence_s)
        worker = Worker(peer, hello, liveness, since=now, progress=progress)
        self._workers[peer] = worker
        return worker

    def set_ready(self, worker: Worker, ready: Ready) -> None:
        """It may be given work from now on.

        Raises:
            ConfigError: a target's ladder holds a time that is not finite and positive.
        """
        if worker.role == TARGET:
            worker.costs = TargetCosts(ready.ladder_ms[:16], self._calibration)
        else:
            worker.draft_ms.extend(ms for ms in ready.ladder_ms[-1:] if math.isfinite(ms))
            self._calibration.prior = Prior.from_notes(ready.notes)  # all drafters are one model
        worker.ready = ready

    def remove(self, worker: Worker) -> None:
        """Forget a worker."""
        self._workers.pop(worker.peer, None)

    def pick(self, role: str, now: float) -> Worker | None:
        """The least loaded worker of a role with room; the longest registered among equals."""
        fit = [
            worker
            for worker in self._workers.values()
            if worker.role == role and worker.has_room(now, self._budget_s)
        ]
        return min(fit, key=lambda worker: worker.load, default=None)

    def may_serve(self, now: float) -> bool:
        """Whether any target is ready, with or without room."""
        return any(
            worker.role == TARGET
            and worker.ready is not None
            and not worker.is_draining
            and worker.liveness.verdict(now, self._budget_s) == ALIVE
            for worker in self._workers.values()
        )

    def capacity(self) -> int:
        """Places of all ready targets."""
        return sum(w.ready.capacity for w in self._workers.values() if w.ready and w.role == TARGET)

    def verdict(self, worker: Worker, now: float) -> str:
        """ALIVE, SILENT or STUCK."""
        budget_s = self._budget_s if worker.ready else math.inf  # loading has the launcher's limit
        return worker.liveness.verdict(now, budget_s)

    def next_deadline(self) -> float | None:
        """When some verdict may change, in monotonic seconds."""
        moments = [
            worker.liveness.next_deadline(self._budget_s if worker.ready else math.inf)
            for worker in self._workers.values()
        ]
        due = min(moments, default=None)
        return None if due is None else due + PAST_S

    # ------------------------------------------------------------------ drafters' record

    def draft_deadline_s(self, drafter: Worker | None) -> float:
        """Three times p95 of its draft times, at least the configured time, and bounded."""
        if drafter is None or not drafter.draft_ms:
            return self._draft_deadline_s
        ordered = sorted(drafter.draft_ms)
        p95_ms = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
        wanted_s = max(DEADLINE_FACTOR * p95_ms / 1e3, self._draft_deadline_s)
        return min(wanted_s, max(MAX_DRAFT_DEADLINE_S, self._draft_deadline_s))

    def draft_took(self, drafter: Worker, ms: float, *, is_in_time: bool) -> None:
        """Record a draft; one that came too late still says how long drafts take."""
        if math.isfinite(ms) and ms >= 0:
            drafter.draft_ms.append(ms)
        if is_in_time:
            drafter.n_strikes = drafter.n_quarantines = 0

    def strike(self, drafter: Worker, reason: str, now: float) -> None:
        """Count one fault; the third in a row is a quarantine, longer each time."""
        drafter.n_strikes += 1
        logger.debug("%s: strike %d, %s", drafter.name, drafter.n_strikes, reason)
        if drafter.n_strikes < MAX_STRIKES:
            return
        seconds = min(MAX_QUARANTINE_S, QUARANTINE_S * 2.0**drafter.n_quarantines)
        drafter.n_strikes = 0
        drafter.n_quarantines += 1
        drafter.quarantined_until = now + seconds
        logger.warning("%s: no drafts asked for %.0f s (%s)", drafter.name, seconds, reason)
