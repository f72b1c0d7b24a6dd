"""Change a running system: more or fewer processes of a role, a fresh one, one less.

Owns what an operator may ask for. Does not know sockets or how a process is kept.
Invariant: a worker that goes is drained first, and changes happen one at a time.
"""

import asyncio
from typing import Final

from common.errors import BadRequest
from common.launcher.plan import COORDINATOR, DRAFTER, TARGET
from common.launcher.processes import Child
from common.launcher.supervisor import Supervisor

MAX_REPLICAS: Final = 64


async def scale(supervisor: Supervisor, role: str, n_wanted: int) -> list[str]:
    """Start or drain processes of a role until there are `n_wanted`; returns the names changed.

    Raises:
        BadRequest: not a role that scales, or a number that makes no sense.
    """
    least = 1 if role == TARGET else 0
    if role not in (TARGET, DRAFTER) or not least <= n_wanted <= MAX_REPLICAS:
        raise BadRequest(
            f"scale {role}={n_wanted}: use target=1..{MAX_REPLICAS} or drafter=0..{MAX_REPLICAS}"
        )
    if role == DRAFTER and supervisor.config.drafter_path is None:
        raise BadRequest("scale drafter: this run has no drafter checkpoint; start with one")
    async with supervisor.changing:
        members = [child for child in supervisor.children if child.spec.role == role]
        extra = members[n_wanted:]
        await asyncio.gather(*(supervisor.retire(child) for child in extra))
        added = [supervisor.add(role) for _ in range(n_wanted - len(members))]
        return [child.spec.name for child in extra] + added


async def restart(supervisor: Supervisor, name: str) -> None:
    """Drain one worker, end its process and start it again under its name."""
    child = _worker(supervisor, name)
    async with supervisor.changing:
        await supervisor.retire(child)
        supervisor.start(child.spec, child.n_restarts + 1)


async def drain(supervisor: Supervisor, name: str) -> None:
    """Drain one worker and end its process for good."""
    child = _worker(supervisor, name)
    async with supervisor.changing:
        await supervisor.retire(child)


def _worker(supervisor: Supervisor, name: str) -> Child:
    workers = {child.spec.name: child for child in supervisor.children}
    workers.pop(COORDINATOR, None)
    if name not in workers:
        raise BadRequest(f"{name!r} is no worker of this run; there are {', '.join(workers)}")
    return workers[name]
