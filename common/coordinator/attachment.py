"""A session's tie to a drafter: tickets, and how long to wait before the next try.

Owns tickets and the back-off after lost links. Does not know rounds. Invariant: a ticket is given
to one drafter only; the next one gets a new ticket, which the target is told first.
"""

from collections.abc import Callable
from typing import Final

from common.coordinator.events import Command, DrafterAssigned, LeaveDrafter, ToDrafter, ToTarget
from common.wire.messages import Attach, Close, Renew

LINK_RETRY_S: Final = 0.25  # doubles with every lost link of the request
MAX_LINK_RETRY_S: Final = 8.0


class Attachment:
    """Ties one session after another to drafters.

    Args:
        new_ticket: makes an unguessable word for a data link.

    Attributes:
        ticket: the one the target knows; "" when no drafter is to be tied.
        has_taps: the target is to keep what drafting needs.
    """

    def __init__(self, new_ticket: Callable[[], str]) -> None:
        self.ticket = ""
        self.has_taps = False
        self._held_block = 0  # B of the drafter; 0 without one
        self._own_block = 0  # B of the target's own head; 0 without one
        self._new_ticket = new_ticket
        self._session, self._epoch = "", 0
        self._is_ticket_fresh = False  # the target knows it, no drafter was given it yet
        self._n_links_lost = 0
        self._closed_until = 0.0

    @property
    def is_held(self) -> bool:
        """Whether a drafter holds a place for the session."""
        return self._held_block > 0

    @property
    def block_size(self) -> int:
        """B of whoever drafts; 0 while nobody does."""
        return self._own_block or self._held_block

    def open(self, session: str, epoch: int, *, has_taps: bool, own_block: int = 0) -> None:
        """Begin with a new session, which no drafter knows; without taps none ever will.

        Args:
            session: its name.
            epoch: of the request.
            has_taps: something may be drafted.
            own_block: B where the target itself drafts; no drafter is tied, then.
        """
        self._session, self._epoch = session, epoch
        self.has_taps, self._own_block = has_taps, own_block if has_taps else 0
        self.ticket = self._new_ticket() if has_taps and not own_block else ""
        self._is_ticket_fresh = True

    def wants(self, now: float) -> bool:
        """Whether a drafter may be asked now."""
        return bool(self.ticket) and not self.is_held and now >= self._closed_until

    def attach(self, event: DrafterAssigned) -> list[Command]:
        """Tell the target the new ticket, if it does not know it, and the drafter where to go."""
        self._held_block = event.block_size
        commands: list[Command] = []
        if not self._is_ticket_fresh:
            self.ticket = self._new_ticket()
            commands.append(ToTarget(Renew(self._session, self.ticket)))
        self._is_ticket_fresh = False
        attach = Attach(self._session, self._epoch, self.ticket, event.endpoint, event.server_key)
        return [*commands, ToDrafter(attach)]

    def leave(self, *, closed_until: float = 0.0) -> list[Command]:
        """Give the drafter's place back."""
        self._closed_until = max(self._closed_until, closed_until)
        if not self.is_held:
            return []
        self._held_block = 0
        return [ToDrafter(Close(self._session)), LeaveDrafter()]

    def retry_s(self) -> float:
        """How long to wait after one more lost link."""
        self._n_links_lost += 1
        return float(min(MAX_LINK_RETRY_S, LINK_RETRY_S * 2.0 ** (self._n_links_lost - 1)))
