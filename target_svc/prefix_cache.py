"""What earlier prompts and replies left behind, for those that begin with the same tokens.

Owns which prefixes are kept, for whom, how many bytes they hold and which goes first. Does not know
rounds, messages or when a prefix is worth keeping; see `kept_after` for that of a prompt.

A prefix is the state after its tokens (every piece a family has), and what a drafter would be fed:
feature rows, or the rows of the target's own head. It holds copies of just the committed rows, so
its bytes are counted as they are, and whoever goes on from it gets a twin: MLX arrays are values,
so nothing that the twin does reaches the prefix.

Invariants: two keys share nothing unless scope, kind and all tokens agree; the bytes held never
exceed the budget; the longest prefix that leaves a token to forward is found.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import mlx.core as mx
import numpy as np

from target_svc.models.state import Own, SequenceState, itself
from target_svc.mtp import HeadContext
from target_svc.taps import FeatureStore

MIB: Final = 1 << 20
COUNTED: Final = (
    "prefix_hits",
    "prefix_misses",
    "prefix_tokens",  # that needed no forward
    "prefix_evictions",
    "prefix_too_large",
)
_BYTES_PER_ID: Final = 4


@dataclass(frozen=True, slots=True)
class Scope:
    """Who may share a prefix.

    Attributes:
        owner: who asked, "" where all clients are one user's; another owner's prefix is never
            found, so nobody can tell by the time of an answer what others have asked.
        kind: what is fed to whoever drafts; a state without features is of no use to a drafter.
    """

    owner: str
    kind: str


@dataclass(frozen=True, slots=True)
class Context:
    """All that a session knows of its tokens so far."""

    state: SequenceState
    store: FeatureStore | None = None
    head: HeadContext | None = None  # of a prefix: open-ended, another token may follow

    def twin(self, own: Own) -> "Context":
        """Another context of the same tokens; neither changes the other."""
        return Context(
            self.state.twin(own),
            None if self.store is None else self.store.twin(own),
            None if self.head is None else self.head.twin(own),
        )


class Copies:
    """Makes copies in buffers of their own size, and counts them.

    A view would keep the whole buffer behind it alive, which nobody would have counted.
    """

    def __init__(self) -> None:
        self.made: list[mx.array] = []

    def __call__(self, array: mx.array) -> mx.array:
        """A copy of the same bits; lazy."""
        if array.size == 0:
            return mx.zeros(array.shape, dtype=array.dtype)
        self.made.append(mx.take(array, mx.arange(array.shape[0]), axis=0))
        return self.made[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(array.nbytes for array in self.made)


@dataclass(frozen=True, slots=True)
class Prefix:
    """One kept prefix."""

    length: int  # tokens
    context: Context
    nbytes: int


class PrefixCache:
    """Prefixes by the hash of their tokens, the least recently used first out.

    Args:
        budget: bytes held at most; 0 keeps nothing.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._kept: OrderedDict[tuple[Scope, bytes], Prefix] = OrderedDict()
        self._lengths: dict[Scope, Counter[int]] = {}
        self._nbytes = 0
        self._counts = dict.fromkeys(COUNTED, 0)

    @property
    def is_on(self) -> bool:
        """Whether anything may be kept."""
        return self._budget > 0

    def keep(self, scope: Scope, ids: Sequence[int], context: Context) -> None:
        """Keep what a session knows after exactly `ids`; evaluates.

        Does nothing where it is kept already, or would not fit the budget alone.
        """
        if not self.is_on or not ids:
            return
        key = (scope, _digests(ids, [len(ids)])[len(ids)])
        if key in self._kept:
            self._kept.move_to_end(key)
            return
        copies = Copies()
        twin = context.twin(copies)
        nbytes = copies.nbytes
        if nbytes > self._budget:
            self._counts["prefix_too_large"] += 1
            return
        while self._nbytes + nbytes > self._budget:
            self._drop(next(iter(self._kept)))
            self._counts["prefix_evictions"] += 1
        mx.eval(copies.made)
        self._kept[key] = Prefix(len(ids), twin, nbytes)
        self._lengths.setdefault(scope, Counter())[len(ids)] += 1
        self._nbytes += nbytes

    def find(self, scope: Scope, ids: Sequence[int]) -> Context | None:
        """A context of the longest prefix of `ids` that leaves one to forward, to go on with."""
        for key in self._keys_of(scope, ids, len(ids) - 1):
            if key in self._kept:
                self._kept.move_to_end(key)
                prefix = self._kept[key]
                self._counts["prefix_hits"] += 1
                self._counts["prefix_tokens"] += prefix.length
                return prefix.context.twin(itself)
        if self.is_on:
            self._counts["prefix_misses"] += 1
        return None

    def forget(self, scope: Scope, ids: Sequence[int]) -> None:
        """Drop every prefix of `ids`: a session that went on from one had to be made anew."""
        for key in self._keys_of(scope, ids, len(ids)):
            if key in self._kept:
                self._drop(key)

    def counters(self) -> dict[str, int]:
        """Running totals and what is held, by name, as `ps` shows them; any thread may ask."""
        if not self.is_on:
            return {}
        held = {"prefix_entries": len(self._kept), "prefix_bytes": self._nbytes}
        return {**self._counts, **held}

    def _keys_of(self, scope: Scope, ids: Sequence[int], longest: int) -> list[tuple[Scope, bytes]]:
        """Keys of the prefixes of `ids` that may be kept, the longest first."""
        lengths = [length for length in self._lengths.get(scope, ()) if length <= longest]
        digests = _digests(ids, lengths)
        return [(scope, digests[length]) for length in sorted(lengths, reverse=True)]

    def _drop(self, key: tuple[Scope, bytes]) -> None:
        prefix, (scope, _) = self._kept.pop(key), key
        self._nbytes -= prefix.nbytes
        lengths = self._lengths[scope]
        lengths[prefix.length] -= 1
        if not lengths[prefix.length]:
            del lengths[prefix.length]
        if not lengths:
            del self._lengths[scope]


class Share:
    """What one session may take from a cache and leave there.

    Args:
        cache: of the target.
        owner: whose prefixes, see `Scope`; None takes nothing and leaves nothing.
        kind: see `Scope`.
    """

    def __init__(self, cache: PrefixCache, owner: str | None, kind: str) -> None:
        self._cache = cache
        self._scope = Scope(owner, kind) if cache.is_on and owner is not None else None

    def find(self, ids: Sequence[int]) -> Context | None:
        """See `PrefixCache.find`; the context's head knows the token after the prefix."""
        found = None if self._scope is None else self._cache.find(self._scope, ids)
        if found is not None and found.head is not None:
            found.head.go_on(ids[found.state.base])
        return found

    def keep(self, ids: Sequence[int], context: Context) -> None:
        """See `PrefixCache.keep`; the context's head may know the token after the prefix."""
        if self._scope is not None:
            head = None if context.head is None else context.head.open_ended()
            self._cache.keep(self._scope, ids, Context(context.state, context.store, head))

    def forget(self, ids: Sequence[int]) -> None:
        """See `PrefixCache.forget`."""
        if self._scope is not None:
            self._cache.forget(self._scope, ids)


def kept_after(start: int, total: int, chunk: int) -> frozenset[int]:
    """Ends of chunks of a prompt whose prefix is kept, beside its own end.

    The last one serves the same prompt once more, or with another end. Of the others those of 1, 2,
    4, 8.. chunks: any shared beginning is then found to at least half its length, and all of them
    hold no more rows than two copies of the last.

    Args:
        start: tokens that need no forward.
        total: of the prompt.
        chunk: tokens per forward.

    >>> sorted(kept_after(0, 2000, 256))
    [256, 512, 1024, 1792]
    """
    ends = {(total - 1) // chunk * chunk}
    end = chunk
    while end < total:
        ends.add(end)
        end *= 2
    return frozenset(end for end in ends if start < end < total)


def _digests(ids: Sequence[int], lengths: Iterable[int]) -> dict[int, bytes]:
    """Hashes of the first so many ids, each; one pass over the ids."""
    data = memoryview(np.asarray(ids, dtype="<i4").tobytes())
    running, done, found = hashlib.blake2b(digest_size=32), 0, dict[int, bytes]()
    for length in sorted(lengths):
        running.update(data[done * _BYTES_PER_ID : length * _BYTES_PER_ID])
        done = length
        found[length] = running.copy().digest()
    return found
