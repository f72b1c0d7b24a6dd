"""What the launcher asks of the coordinator, as the administrator of the run.

Owns the calls and their deadlines. Does not know processes.
"""

from collections.abc import Mapping
from typing import Any, Protocol


class CoordinatorLink(Protocol):
    """What the supervisor asks of the coordinator; every call ends within its time."""

    async def status(self) -> Mapping[str, Any] | None:
        """The coordinator's Status, or None when it does not answer."""
        ...

    async def exited(self, name: str, reason: str) -> None:
        """Tell it that a worker's process is gone."""
        ...

    async def drain(self, name: str, timeout_s: float) -> bool:
        """Drain one worker; False: not done in time."""
        ...
