"""Which ids a sequence has held, and how often its reply has.

Host integers only. Does not know scores. Invariant: drafts are counted for the row that asks and
never kept; only committed ids are.
"""

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class Seen:
    """Counts of one sequence.

    Args:
        prompt_ids: ids before the reply.
        reply_ids: ids of the reply that are committed already, on a replay.
    """

    def __init__(self, prompt_ids: Iterable[int], reply_ids: Iterable[int] = ()) -> None:
        self._prompt = frozenset(prompt_ids)
        self._reply = Counter(reply_ids)

    def add(self, ids: Iterable[int]) -> None:
        """Newly committed ids of the reply."""
        self._reply.update(ids)

    def counted(self, drafts: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ids of the reply and of `drafts` after it, each once, and their counts."""
        counts = self._reply + Counter(drafts)
        ids = np.fromiter(counts.keys(), np.int64, len(counts))
        return ids, np.fromiter(counts.values(), np.int64, len(counts))

    def everything(self, drafts: tuple[int, ...]) -> NDArray[np.int64]:
        """Ids of prompt, reply and `drafts`, each once."""
        ids = self._prompt.union(self._reply, drafts)
        return np.fromiter(ids, np.int64, len(ids))
