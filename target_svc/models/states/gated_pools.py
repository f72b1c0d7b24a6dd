"""Index keys of attention over pools of tokens: raw rows of the open pool, one key per full one.

Does not know how keys are pooled or scored. Invariants: a pooled key is stored exactly for the
pools whose rows are all committed; raw rows are kept only for the pool that is still open, so they
must be pooled in the forward that fills it.
"""

import copy
from collections.abc import Sequence

import mlx.core as mx

from common.errors import RollBackRefused
from target_svc.models.state import Own, refuse_unless
from target_svc.models.states.rows import GrowingRows


class GatedPools:
    """Raw rows of the open pool and pooled keys of the full ones.

    Args:
        raw_width: of a raw row.
        key_width: of a pooled key.
        pool: tokens in a pool.
        dtype: of raw rows; pooled keys are float32.

    Attributes:
        open: committed raw rows of the open pool, [0..pool-1, raw_width].
    """

    def __init__(self, raw_width: int, key_width: int, pool: int, dtype: mx.Dtype) -> None:
        self.open = mx.zeros((0, raw_width), dtype=dtype)
        self._pool = pool
        self._keys = GrowingRows(0, key_width, mx.float32)
        self._seen: mx.array | None = None

    @property
    def keys(self) -> mx.array:
        """Pooled keys, [pools, key_width], those of the present forward included."""
        return self._keys.buffer[: self._keys.length + self._keys.captured]

    def extend(self, new: mx.array) -> mx.array:
        """Capture raw rows [R, raw_width]; returns the rows of pools that are full now, or [0, ..].

        `add` must be given their keys before the forward ends.
        """
        self._seen = mx.concatenate([self.open, new])
        return self._seen[: self._seen.shape[0] // self._pool * self._pool]

    def add(self, keys: mx.array) -> None:
        """Capture the pooled keys of the pools that `extend` handed out."""
        self._keys.append(keys)

    @property
    def unread(self) -> Sequence[mx.array]:
        """See `Rollable`: raw rows wait for their pool, keys for the first that are dropped."""
        return (self.open if self._seen is None else self._seen, self._keys.buffer)

    def let_go(self) -> None:
        """See `Buffered`."""
        self._keys.let_go()

    def check(self, rows: int, keep: int) -> None:
        """See `Rollable`."""
        seen = 0 if self._seen is None else self._seen.shape[0]
        refuse_unless(max(0, seen - self.open.shape[0]), rows, "the open pool")
        if self._keys.captured != seen // self._pool:
            raise RollBackRefused(
                f"{self._keys.captured} pooled keys captured for {seen // self._pool} full pools; "
                "every full pool must have one"
            )

    def roll_back(self, keep: int) -> None:
        """See `Rollable`."""
        full = 0
        if keep and self._seen is not None:
            end = self.open.shape[0] + keep
            full = end // self._pool
            self.open = self._seen[full * self._pool : end]
        self._keys.roll_back(full)
        self._seen = None

    def twin(self, own: Own) -> "GatedPools":
        """See `Rollable`."""
        twin = copy.copy(self)
        twin.open, twin._keys, twin._seen = own(self.open), self._keys.twin(own), None
        return twin
