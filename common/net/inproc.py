"""A network inside one thread: seeded, with a virtual clock and faults. Ships for tests.

Owns delivery, faults and time. Does not know what nodes do. Every message is packed and unpacked,
so the codec is exercised and nobody shares an object.
Invariant: equal seeds, nodes and calls give an equal run; real time is never read.

Names: a *node* is an address; its *owner* is the process it belongs to. Faults and kills are said
of owners. A worker has a node per connection, so that a reconnect has a new routing id.
"""

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from common.wire.codec import Frame, pack, unpack
from common.wire.messages import Message

LOST_AFTER_S: Final = 0.002  # a killed process on the same host is seen after about 2 ms
MAX_CALLS_AT_ONCE: Final = 10_000  # deadlines or work at one instant before it counts as livelock


@dataclass(frozen=True, slots=True)
class Faults:
    """What happens to messages of one direction of one link."""

    drop: float = 0.0  # probability
    duplicate: float = 0.0  # probability
    reorder: float = 0.0  # probability of ignoring the order of sending, up to 10 delays late
    delay_s: tuple[float, float] = (0.0001, 0.0001)  # uniform lo..hi
    cut: bool = False  # partition: everything vanishes, nobody is told


@dataclass(slots=True)
class Node:
    """One address and what is called there; times are virtual seconds."""

    name: str
    owner: str
    on_message: Callable[[str, Message, float], None]  # sender's node name
    on_lost: Callable[[str, float], None]
    next_deadline: Callable[[], float | None]
    on_time: Callable[[float], None]
    work: Callable[[float], bool]
    partners: set[str] = field(default_factory=set)  # node names with an open connection
    work_due: bool = False


@dataclass(slots=True)
class Counts:
    """What the mesh did so far, for tests that must prove that faults happened."""

    sent: int = 0
    delivered: int = 0
    dropped: int = 0
    duplicated: int = 0
    reordered: int = 0
    refused: int = 0  # send returned False


def _nothing(*_: object) -> None:
    return None


def _no_work(_now: float) -> bool:
    return False


class Mesh:
    """The network; `run` drives it.

    Args:
        seed: of every random choice.
        work_s: virtual time that one call of a node's `work` takes.
    """

    def __init__(self, seed: int = 0, *, work_s: float = 0.001) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.counts = Counts()
        self.nodes: dict[str, Node] = {}
        self._work_s = work_s
        self._faults: dict[tuple[str, str], Faults] = {}
        self._default = Faults()
        self._order = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._last_arrival: dict[tuple[str, str], float] = {}
        self._stalled: dict[str, list[Callable[[], None]]] = {}

    # ------------------------------------------------------------------ nodes

    def add(
        self,
        name: str,
        *,
        on_message: Callable[[str, Message, float], None],
        on_lost: Callable[[str, float], None] = _nothing,
        next_deadline: Callable[[], float | None] = _nothing,
        on_time: Callable[[float], None] = _nothing,
        work: Callable[[float], bool] = _no_work,
        owner: str = "",
    ) -> None:
        """Register a node; `owner` defaults to its own name.

        Raises:
            ValueError: a living node has this name.
        """
        if name in self.nodes:
            raise ValueError(f"node: expected a new name, got {name!r}, which is alive")
        node = Node(name, owner or name, on_message, on_lost, next_deadline, on_time, work)
        self.nodes[name] = node
        self._want_work(node)

    def remove(self, name: str) -> None:
        """Close one node; its partners hear of it after what is already on its way."""
        node = self.nodes.pop(name, None)
        for partner in sorted(node.partners) if node else ():
            other = self.nodes.get(partner)
            if other is not None and node is not None:
                self._tell_lost(node, other)

    def kill(self, owner: str) -> None:
        """End a process without a word: all its nodes vanish at once."""
        for name in sorted(name for name, node in self.nodes.items() if node.owner == owner):
            self.remove(name)
        self._stalled.pop(owner, None)

    def stall(self, owner: str) -> None:
        """Stop a process (SIGSTOP): nothing is called there until `resume`."""
        self._stalled.setdefault(owner, [])

    def resume(self, owner: str) -> None:
        """Let a stalled process go on; what was waiting for it comes first."""
        for call in self._stalled.pop(owner, []):
            self._at(self.now, call)

    def connect(self, name: str, other: str) -> bool:
        """Note an open connection, so that each side hears of the other's end."""
        if name not in self.nodes or other not in self.nodes:
            return False
        self.nodes[name].partners.add(other)
        self.nodes[other].partners.add(name)
        return True

    def next_number(self) -> int:
        """A number not given before, for names of connections."""
        return next(self._order)

    # ------------------------------------------------------------------ faults

    def fault(self, sender: str, receiver: str, faults: Faults) -> None:
        """Set the faults from one owner to another, this direction only."""
        self._faults[sender, receiver] = faults

    def fault_all(self, faults: Faults) -> None:
        """Set the faults of every direction that `fault` did not name."""
        self._default = faults

    def partition(self, left: str, right: str) -> None:
        """Let everything between two owners vanish, both ways, until `heal`."""
        for pair in ((left, right), (right, left)):
            self._faults[pair] = replace(self._faults.get(pair, self._default), cut=True)

    def heal(self, left: str, right: str) -> None:
        """End a partition."""
        for pair in ((left, right), (right, left)):
            self._faults[pair] = replace(self._faults.get(pair, self._default), cut=False)

    # ------------------------------------------------------------------ messages

    def send(self, sender: str, receiver: str, message: Message) -> bool:
        """Put a message on its way.

        Returns:
            False when either node is known to be gone; what was sent to a node that died since
            the last look is lost without a word, as on real sockets.

        Raises:
            WireError: the message cannot be packed.
        """
        frames = pack(message)
        if not self.connect(sender, receiver):
            self.counts.refused += 1
            return False
        self.counts.sent += 1
        source, target = self.nodes[sender], self.nodes[receiver]
        faults = self._faults.get((source.owner, target.owner), self._default)
        if faults.cut or self.random.random() < faults.drop:
            self.counts.dropped += 1
            return True
        self._post(source, target, frames, faults)
        if self.random.random() < faults.duplicate:
            self.counts.duplicated += 1
            self._post(source, target, frames, faults)
        return True

    def _post(self, source: Node, target: Node, frames: list[Frame], faults: Faults) -> None:
        link = (source.name, target.name)
        delay_s = self.random.uniform(*faults.delay_s)
        if self.random.random() < faults.reorder:
            self.counts.reordered += 1
            arrival = self.now + delay_s * (1.0 + 9.0 * self.random.random())
        else:
            arrival = max(self.now + delay_s, self._last_arrival.get(link, 0.0))
            self._last_arrival[link] = arrival
        self._at(arrival, lambda: self._deliver(source.name, target, frames))

    def _deliver(self, sender: str, target: Node, frames: list[Frame]) -> None:
        if self.nodes.get(target.name) is not target:
            self.counts.dropped += 1
            return
        self.counts.delivered += 1
        message = unpack(frames)

        def call() -> None:
            target.on_message(sender, message, self.now)
            self._want_work(target)

        self._call(target, call)

    def _tell_lost(self, gone: Node, other: Node) -> None:
        other.partners.discard(gone.name)
        arrival = max(self.now + LOST_AFTER_S, self._last_arrival.pop((gone.name, other.name), 0.0))

        def call() -> None:
            other.on_lost(gone.name, self.now)
            self._want_work(other)

        def tell() -> None:
            if self.nodes.get(other.name) is other:
                self._call(other, call)

        self._at(arrival, tell)

    # ------------------------------------------------------------------ time

    def at(self, delay_s: float, call: Callable[[], None]) -> None:
        """Do something later: a kill, a partition, the next request."""
        self._at(self.now + delay_s, call)

    def run(self, until: Callable[[], bool] = lambda: False, *, limit_s: float = 60.0) -> bool:
        """Advance virtual time until a condition holds, nothing is left to do, or the limit.

        Returns:
            Whether the condition holds.
        """
        end, calls_at_once = self.now + limit_s, 0
        while not until():
            moment, timed = self._next()
            if moment is None or moment > end:
                self.now = max(self.now, end)
                return until()
            calls_at_once = calls_at_once + 1 if moment <= self.now else 0
            if calls_at_once > MAX_CALLS_AT_ONCE:
                raise RuntimeError(f"mesh: {calls_at_once} calls at {self.now:.6f} s: livelock")
            self.now = max(self.now, moment)
            if timed is None:
                heapq.heappop(self._queue)[2]()
            else:
                timed.on_time(self.now)
                self._want_work(timed)
        return True

    def _next(self) -> tuple[float | None, Node | None]:
        """When something happens next, and to which node's deadline (None: the queue's head)."""
        best: float | None = self._queue[0][0] if self._queue else None
        timed: Node | None = None
        for node in self.nodes.values():
            deadline = None if node.owner in self._stalled else node.next_deadline()
            if deadline is not None and (best is None or deadline < best):
                best, timed = deadline, node
        return best, timed

    def _at(self, moment: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (moment, next(self._order), call))

    def _call(self, node: Node, call: Callable[[], None]) -> None:
        waiting = self._stalled.get(node.owner)
        if waiting is None:
            call()
        else:
            waiting.append(call)

    def _want_work(self, woken: Node) -> None:
        """Let a process do background work after whatever woke it, as a worker's shell does."""
        for node in self.nodes.values():
            if node.owner == woken.owner and node.work is not _no_work and not node.work_due:
                node.work_due = True
                self._at(self.now, partial(self._call, node, partial(self._work, node)))

    def _work(self, node: Node) -> None:
        node.work_due = False
        if self.nodes.get(node.name) is node and node.work(self.now):
            node.work_due = True
            self._at(self.now + self._work_s, partial(self._call, node, partial(self._work, node)))
