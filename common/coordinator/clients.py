"""What clients ask about requests: submit, resume, read on, cancel, and how they leave.

Owns the answers to a Submit. Does not know workers, registrations or the order of a reply
(`delivery`). Times are passed in.
"""

from common.coordinator.delivery import Delivery
from common.coordinator.events import Phase, Post
from common.coordinator.intake import request_of
from common.coordinator.readers import Readers
from common.coordinator.requests import Requests
from common.coordinator.tally import Tally
from common.errors import Busy, Cancelled, DFlashError
from common.wire.messages import Accepted, Failed, Read, Submit


class Clients:
    """Speaks with clients about their requests.

    Args:
        requests: what runs or waits.
        readers: who reads which reply.
        tally: what is counted.
        post: takes a message for a peer.
    """

    def __init__(self, requests: Requests, readers: Readers, tally: Tally, post: Post) -> None:
        self._requests = requests
        self._readers = readers
        self._tally = tally
        self._post = post
        self._n_requests = 0

    def submit(
        self, peer: str, message: Submit, now: float, key: str, *, is_draining: bool
    ) -> None:
        """Let a request in, or let its client come back to it; answers with Accepted or Failed."""
        if self._readers.find(peer, message.request) is not None:
            self._tally.stale()  # the same Submit once more
            return
        try:
            known = self._readers.claimed(key, message)
            if known is not None:
                self._resume(known, peer, message, now)
            elif is_draining:
                raise Busy("the coordinator is going down; send the request elsewhere")
            else:
                self._begin(peer, message, now, key)
        except DFlashError as fault:
            retry_after_s = fault.retry_after_s if isinstance(fault, Busy) else 0.0
            self._post(peer, Failed(message.request, fault.code, fault.message, retry_after_s))
            self._tally.refused(fault.code)

    def _begin(self, peer: str, message: Submit, now: float, key: str) -> None:
        self._n_requests += 1
        request = request_of(message, self._n_requests, peer, now, key)
        delivery = self._readers.new(request.number, peer, key, message)
        n_before = self._requests.submit(request, delivery)
        self._readers.enter(delivery)
        self._post(peer, Accepted(message.request, message.sampling.seed, n_before))

    def _resume(self, delivery: Delivery, peer: str, message: Submit, now: float) -> None:
        """The request may run, wait, or have ended."""
        running = self._requests.get(delivery.number)
        n_before = 0
        if running is not None:
            running.deadline = now + message.deadline_ms / 1e3 if message.deadline_ms else None
            is_waiting = running.machine.phase is Phase.WAITING
            n_before = self._requests.n_waiting if is_waiting else 0
        self._tally.resumed()
        self._readers.resume(delivery, peer, message, n_before, now)
        self._requests.go_on(delivery.number, now)

    def read(self, peer: str, message: Read, now: float) -> None:
        """A client took tokens; a request that was paused for it goes on."""
        delivery = self._readers.find(peer, message.request)
        if delivery is not None:
            self._readers.read(delivery, message.index, now)
            self._requests.go_on(delivery.number, now)

    def cancel(self, peer: str, name: str, now: float) -> None:
        """A client wants no more of one request; an unknown one is none any more."""
        delivery = self._readers.find(peer, name)
        if delivery is None:
            return
        if self._requests.get(delivery.number) is None:
            self._readers.cancel(delivery)
        self._requests.stop(delivery.number, Cancelled.code, f"request {name}: cancelled", now)

    def lost(self, peer: str, now: float) -> None:
        """Nobody reads the answers; what has a claim goes on for a while, the rest ends."""
        for delivery in self._readers.of(peer):
            if delivery.owner is None:
                self._requests.stop(delivery.number, Cancelled.code, "the client is gone", now)
            else:
                self._readers.leave(delivery, now)
                self._requests.go_on(delivery.number, now)
