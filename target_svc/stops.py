"""Stop strings: texts that end a reply and are no part of it.

Owns the text that may still turn out to begin a stop string. Does not know ids or tokens.
Invariant: whatever way a text is cut into pieces, what comes out joined is the text up to the
earliest end of a stop string, less that string; of strings that end together the longest counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shown:
    """What of the text is known to be part of the reply."""

    text: str
    is_stopped: bool


class StopStrings:
    """Follows one text.

    Args:
        stops: the strings; none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._is_stopped = False

    @property
    def is_needed(self) -> bool:
        """Whether any text can end the reply."""
        return bool(self._stops)

    def push(self, piece: str) -> Shown:
        """Take the next piece; what can be shown now. After a stop nothing more can."""
        if not self._stops or self._is_stopped:
            return Shown("" if self._is_stopped else piece, self._is_stopped)
        text, seen = self._held + piece, len(self._held)
        found = self._earliest(text, seen)
        if found is not None:
            self._held, self._is_stopped = "", True
            return Shown(text[:found], True)
        keep = len(text) - self._beginning(text)
        self._held = text[keep:]
        return Shown(text[:keep], False)

    def finish(self) -> str:
        """The text still held back: the reply ended before it became a stop string."""
        held, self._held = self._held, ""
        return held

    def _earliest(self, text: str, seen: int) -> int | None:
        """Where the stop string begins that ends first, behind what was seen before."""
        found = None
        for stop in self._stops:
            at = text.find(stop, max(0, seen + 1 - len(stop)))
            if at >= 0 and (found is None or (at + len(stop), at) < found):
                found = at + len(stop), at
        return None if found is None else found[1]

    def _beginning(self, text: str) -> int:
        """Characters at the end of `text` that may begin a stop string, the most there are."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
