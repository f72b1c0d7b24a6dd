"""Index keys of sparse attention: raw rows, and one pooled key per complete block.

Does not know how keys are pooled or scored. Invariant: a pooled key is stored only for blocks whose
rows are all stored.
"""

import copy
from collections.abc import Sequence

import mlx.core as mx

from target_svc.models.state import Own
from target_svc.models.states.rows import GrowingRows


class PooledKeys:
    """Index keys: raw rows by position, and one pooled key per complete block, made when needed.

    Raw rows are kept for the whole context, so a cut is a length; pooled keys of complete blocks
    are never made twice, and a block that a rejected row completed is dropped.
    """

    def __init__(self, width: int, ratio: int, dtype: mx.Dtype) -> None:
        self.raw = GrowingRows(0, width, dtype)
        self._ratio = ratio
        self._pooled = GrowingRows(0, width, mx.float32)

    @property
    def n_pooled(self) -> int:
        """Blocks whose pooled key is stored, those of the present forward included."""
        return self._pooled.length + self._pooled.captured

    def add_pooled(self, keys: mx.array) -> None:
        """Capture the pooled keys of the next blocks, [n, D]; at most once in a forward."""
        self._pooled.append(keys)

    def pooled(self, blocks: int) -> mx.array:
        """Pooled keys of the first `blocks` blocks, [blocks, D]."""
        return self._pooled.buffer[:blocks]

    @property
    def unread(self) -> Sequence[mx.array]:
        """See `Rollable`: index keys are appended long before anything scores them."""
        return (self.raw.buffer, self._pooled.buffer)

    def let_go(self) -> None:
        """See `Buffered`."""
        self.raw.let_go()
        self._pooled.let_go()

    def cut(self, length: int) -> None:
        """Forget committed rows from `length` on, and the pooled keys of blocks they completed."""
        self.raw.cut(length)
        self._pooled.cut(length // self._ratio)

    def check(self, rows: int, keep: int) -> None:
        """See `Rollable`."""
        self.raw.check(rows, keep)

    def roll_back(self, keep: int) -> None:
        """See `Rollable`."""
        self.raw.roll_back(keep)
        complete = self.raw.length // self._ratio - self._pooled.length
        self._pooled.roll_back(min(self._pooled.captured, complete) if keep else 0)

    def twin(self, own: Own) -> "PooledKeys":
        """See `Rollable`."""
        twin = copy.copy(self)
        twin.raw, twin._pooled = self.raw.twin(own), self._pooled.twin(own)
        return twin
