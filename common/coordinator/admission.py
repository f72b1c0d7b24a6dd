"""Who may come in, and whose turn is next.

Owns the queue and the estimate of how long it takes. Does not know workers; times are passed in.
Invariant: clients take turns, each first come first served, and a request that lost its target
goes before all that have not begun.
"""

from collections import OrderedDict, deque
from typing import Final

from common.errors import Busy

MAX_WAIT_S: Final = 600.0  # a request that waits longer is refused: every wait has an end
DURATION_WEIGHT: Final = 0.2
FIRST_GUESS_S: Final = 5.0  # how long a request takes, before any has finished


class Queue:
    """Requests that wait for a target.

    Args:
        max_len: more are refused as busy.
    """

    def __init__(self, max_len: int) -> None:
        self._max_len = max_len
        self._again: deque[int] = deque()
        self._by_client: OrderedDict[str, deque[int]] = OrderedDict()
        self._len = 0
        self._duration_s = FIRST_GUESS_S

    def __len__(self) -> int:
        return self._len + len(self._again)

    def put(self, number: int, client: str, n_places: int) -> int:
        """Let a request wait.

        Args:
            number: the request.
            client: whose turn it uses.
            n_places: sessions that all targets together can hold, for the estimate.

        Returns:
            How many wait before it, at most.

        Raises:
            Busy: the queue is full; carries when to try again.
        """
        n_before = len(self)
        if n_before >= self._max_len:
            retry_after_s = max(1.0, self._duration_s * n_before / max(1, n_places))
            raise Busy(
                f"{n_before} requests wait already, the limit; "
                f"try again in about {retry_after_s:.0f} s",
                retry_after_s,
            )
        self._by_client.setdefault(client, deque()).append(number)
        self._len += 1
        return n_before

    def put_first(self, number: int) -> None:
        """Let a request that had begun wait; it is never refused."""
        self._again.append(number)

    def take(self) -> int | None:
        """Whose turn it is; the client then stands at the end of the line."""
        if self._again:
            return self._again.popleft()
        if not self._by_client:
            return None
        client, waiting = self._by_client.popitem(last=False)
        number = waiting.popleft()
        self._len -= 1
        if waiting:
            self._by_client[client] = waiting
        return number

    def remove(self, number: int) -> None:
        """Forget a request, wherever it waits."""
        if number in self._again:
            self._again.remove(number)
            return
        for client, waiting in list(self._by_client.items()):
            if number in waiting:
                waiting.remove(number)
                self._len -= 1
                if not waiting:
                    del self._by_client[client]

    def finished(self, took_s: float) -> None:
        """A request was served in `took_s`; moves the estimate."""
        self._duration_s += DURATION_WEIGHT * (took_s - self._duration_s)
