"""One request and the workers that hold it, and when it ends whatever happens.

Owns the pairing only. Does not know what the machine does.
"""

import math
from dataclasses import dataclass

from common.coordinator.admission import MAX_WAIT_S
from common.coordinator.delivery import Delivery
from common.coordinator.events import Phase, Scene, Stopped
from common.coordinator.machine import RequestMachine
from common.coordinator.registry import Registry, Worker
from common.errors import Busy, Cancelled, DeadlineExceeded


@dataclass(slots=True, eq=False)
class Running:
    """A request that runs or waits."""

    machine: RequestMachine
    delivery: Delivery  # to its client
    deadline: float | None = None  # the client's own, in monotonic seconds
    target: Worker | None = None
    drafter: Worker | None = None

    @property
    def expires_at(self) -> float:
        """When it ends for want of time, in monotonic seconds.

        That is its deadline, the end of its client's grace, or of a long wait in the queue.
        """
        request = self.machine.request
        moments = (self.deadline, self.delivery.leaves_at)
        ends = min((moment for moment in moments if moment is not None), default=math.inf)
        is_new = self.machine.phase is Phase.WAITING and not self.machine.reply.ids
        return min(ends, request.submitted_at + MAX_WAIT_S) if is_new else ends

    @property
    def is_pause_over(self) -> bool:
        """Whether it waits for a reader that no longer is behind."""
        return self.machine.phase is Phase.PAUSED and not self.delivery.is_behind

    @property
    def due(self) -> float:
        """When it wants to be looked at, in monotonic seconds."""
        due = self.machine.due
        return self.expires_at if due is None else min(due, self.expires_at)

    @property
    def who_drafts(self) -> Worker | None:
        """The drafter, or the target where it drafts for itself."""
        if self.target is not None and self.target.drafts_itself:
            return self.target
        return self.drafter

    def holds(self, worker: Worker) -> bool:
        """Whether a worker is one of its two."""
        return worker is self.target or worker is self.drafter

    def scene(self, registry: Registry, now: float) -> Scene:
        """The world as its next round sees it."""
        drafter = self.drafter
        drafts_itself = self.target is not None and self.target.drafts_itself
        return Scene(
            is_solo=self.target is None or len(self.target.sessions) <= 1,
            can_draft=drafts_itself or (drafter is not None and not drafter.is_quarantined(now)),
            draft_deadline_s=registry.draft_deadline_s(drafter),
            is_reader_behind=self.delivery.is_behind,
        )

    def expired(self, now: float) -> Stopped:
        """The event for a request whose time is over."""
        request = self.machine.request
        waited_s = now - request.submitted_at
        leaves_at = self.delivery.leaves_at
        if leaves_at is not None and now >= leaves_at:
            return Stopped(Cancelled.code, f"request {request.name}: its client did not come back")
        if self.deadline is not None and now >= self.deadline:
            text = f"request {request.name}: not done after {waited_s:.3f} s, its deadline"
            return Stopped(DeadlineExceeded.code, text)
        text = f"request {request.name}: no target was free within {waited_s:.0f} s; try again"
        return Stopped(Busy.code, text)
