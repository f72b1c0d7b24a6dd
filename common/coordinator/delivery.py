"""One reply on its way to its reader: what was sent, what was read, what is kept for a resume.

Owns the order of what a client sees of one request, and its credit. Does not know the request's
rounds, other clients or time.
Invariant: tokens go out in order and once per connection, at most `window` of them (and one block)
ahead of what the reader took; the end goes out after the last token.
"""

import bisect
from dataclasses import replace

from common.coordinator.events import ToReader
from common.errors import Cancelled
from common.wire.messages import Done, Failed, PrefillProgress, Tokens


class Delivery:
    """The reply of one request.

    Args:
        number: of the request.
        client: who reads it: a peer; "" while nobody does.
        name: what that client calls the request.
        window: most tokens sent and not yet read; 0: no limit, the link's own mark is the fuse.
        owner: key and claim that may resume it; None: nothing is kept.

    Attributes:
        n_tokens: committed so far.
        n_values: numbers and texts that are kept, a measure of memory.
        leaves_at: when it is given up for want of its client, in monotonic seconds; None: not now.
    """

    def __init__(
        self,
        number: int,
        client: str,
        name: str,
        window: int = 0,
        owner: tuple[str, str] | None = None,
    ) -> None:
        self.number = number
        self.client, self.name, self.window = client, name, window
        self.owner = owner
        self.seed = 0
        self.digest = b""
        self.n_tokens = self.n_values = 0
        self.leaves_at: float | None = None
        self._kept: list[Tokens] = []
        self._end: Done | Failed | None = None
        self._n_sent = self._n_read = 0
        self._is_end_sent = False

    @property
    def is_behind(self) -> bool:
        """Whether the reader has its window full: nothing more should be made for it."""
        is_read = bool(self.client) and self.window > 0
        return is_read and self.n_tokens - self._n_read >= self.window

    @property
    def is_whole(self) -> bool:
        """Whether the reader was sent everything, the end too."""
        return self._is_end_sent

    def take(self, message: ToReader) -> list[ToReader]:
        """Take what the request says; returns what may go to the reader now."""
        match message:
            case Tokens():
                self.n_tokens = message.index + len(message.ids)
                if self.owner is None:
                    self._n_sent = self.n_tokens
                    return [self._named(message)]
                self._kept.append(message)
                self.n_values += 2 * len(message.ids) + len(message.logprobs)
                self.n_values += 2 * len(message.top_ids)
                return self._sendable()
            case PrefillProgress():
                return [self._named(message)] if self.client else []
            case Done() | Failed():
                self._end = message
                return self._sendable()

    def read(self, index: int) -> list[ToReader]:
        """The reader took every token below `index`; returns what may go to it now."""
        self._n_read = max(self._n_read, min(index, self._n_sent))
        return self._sendable()

    def leave(self) -> None:
        """The reader is gone."""
        self.client = ""

    def attach(self, client: str, name: str, window: int, from_index: int) -> None:
        """Begin again with another reader, which has every token below `from_index`."""
        self.client, self.name, self.window = client, name, window
        self._n_sent = self._n_read = from_index
        self._is_end_sent = False
        self.leaves_at = None

    def resend(self) -> list[ToReader]:
        """What a reader that has just come may be sent."""
        return self._sendable()

    def _sendable(self) -> list[ToReader]:
        if not self.client:
            return []
        if isinstance(self._end, Failed) and self._end.code == Cancelled.code:
            self._n_sent = self.n_tokens  # who wants no more gets no more
        out: list[ToReader] = []
        at = bisect.bisect_right(self._kept, self._n_sent, key=lambda group: group.index) - 1
        for group in self._kept[max(0, at) :]:
            if self.window and self._n_sent - self._n_read >= self.window:
                break
            skipped = self._n_sent - group.index
            if skipped < len(group.ids):
                out.append(self._named(_part(group, skipped)))
                self._n_sent = group.index + len(group.ids)
        if self._end is not None and self._n_sent == self.n_tokens and not self._is_end_sent:
            self._is_end_sent = True
            out.append(self._named(self._end))
        return out

    def _named(self, message: ToReader) -> ToReader:
        """The message under the reader's own name for the request."""
        if isinstance(message, PrefillProgress | Failed):
            return message if message.name == self.name else replace(message, name=self.name)
        return message if message.request == self.name else replace(message, request=self.name)


def _part(group: Tokens, skipped: int) -> Tokens:
    """The tokens of a group without its first ones, which the reader has."""
    if not skipped:
        return group
    n_top = skipped * (len(group.top_ids) // len(group.ids))
    return Tokens(
        group.request,
        group.index + skipped,
        group.ids[skipped:],
        group.pieces[skipped:],
        max(0, group.n_accepted - skipped),
        group.logprobs[skipped:],
        group.top_ids[n_top:],
        group.top_logprobs[n_top:],
    )
