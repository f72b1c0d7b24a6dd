"""The last token ids, for layers whose rows are a function of ids.

Host integers only. Does not know what is looked up by them.
"""

import copy
from collections.abc import Sequence

import mlx.core as mx

from target_svc.models.state import Own, refuse_unless


class TokenHistory:
    """The last raw token ids that n-gram rows look back on; before the start all are `filler`."""

    def __init__(self, count: int, filler: int) -> None:
        self.ids: tuple[int, ...] = (filler,) * count
        self._captured: tuple[int, ...] = ()

    def extend(self, ids: Sequence[int]) -> list[int]:
        """Capture the ids of this forward; returns the history and them."""
        self._captured = tuple(ids)
        return [*self.ids, *self._captured]

    @property
    def unread(self) -> Sequence[mx.array]:
        """See `Rollable`."""
        return ()

    def check(self, rows: int, keep: int) -> None:
        """See `Rollable`."""
        refuse_unless(len(self._captured), rows, "the token history")

    def roll_back(self, keep: int) -> None:
        """See `Rollable`."""
        seen = self.ids + self._captured[:keep]
        self.ids = seen[len(seen) - len(self.ids) :]
        self._captured = ()

    def twin(self, own: Own) -> "TokenHistory":
        """See `Rollable`."""
        twin = copy.copy(self)
        twin._captured = ()
        return twin
