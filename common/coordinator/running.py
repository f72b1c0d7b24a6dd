"""One request and the workers that hold it, and when it ends whatever happens.

Owns the pairing only. Does not know what the machine does.
"""

import math
from dataclasses import dataclass

from common.coordinator.admission import MAX_WAIT_S
from common.coordinator.events import Phase, Scene, Stopped
from common.coordinator.machine import RequestMachine
from common.coordinator.registry import Registry, Worker
from common.errors import Busy, DeadlineExceeded


@dataclass(slots=True, eq=False)
class Running:
    """A request that runs or waits."""

    machine: RequestMachine
    target: Worker | None = None
    drafter: Worker | None = None

    @property
    def expires_at(self) -> float:
        """When it ends for want of time, in monotonic seconds: its deadline, or a long wait."""
        request = self.machine.request
        ends = math.inf if request.expires_at is None else request.expires_at
        is_new = self.machine.phase is Phase.WAITING and not self.machine.reply.ids
        return min(ends, request.submitted_at + MAX_WAIT_S) if is_new else ends

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
        )

    def expired(self, now: float) -> Stopped:
        """The event for a request whose time is over."""
        request = self.machine.request
        waited_s = now - request.submitted_at
        if request.expires_at is not None and now >= request.expires_at:
            text = f"request {request.name}: not done after {waited_s:.3f} s, its deadline"
            return Stopped(DeadlineExceeded.code, text)
        text = f"request {request.name}: no target was free within {waited_s:.0f} s; try again"
        return Stopped(Busy.code, text)
