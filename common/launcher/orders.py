"""Orders from the command line to a running launcher, over the run folder's own socket.

Owns both ends of `launcher.sock`. Does not know processes beyond the supervisor's verbs.
Who may open the run folder may give orders: its mode is 0700.
"""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from common.errors import BadRequest, DFlashError, PeerLost, from_wire
from common.launcher.rundir import running_launcher
from common.launcher.scaling import drain, restart, scale
from common.launcher.supervisor import Supervisor
from common.net.transport import Endpoint
from common.net.zeromq import AsyncRouter, ClientLink
from common.sdk.locate import LAUNCHER_SOCKET, ipc
from common.wire.messages import Order, Report, Scalar

QUICK_S: Final = 10.0
CONNECT_S: Final = 2.0


async def serve_orders(router: AsyncRouter, supervisor: Supervisor) -> None:
    """Answer orders until cancelled; a slow one does not hold up the next."""
    tasks: set[asyncio.Task[None]] = set()
    try:
        while True:
            received = await router.recv()
            if isinstance(received.body, Order):
                task = asyncio.create_task(_answer(router, received.id, received.body, supervisor))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
    finally:
        for task in tasks:
            task.cancel()


def ask(
    run_dir: Path, verb: str, timeout_s: float = QUICK_S, **arguments: Scalar
) -> dict[str, Any]:
    """Give one order and wait for its report.

    Raises:
        PeerLost: no launcher serves this folder.
        DFlashError: the order failed; the type is the failure's.
    """
    path = run_dir / LAUNCHER_SOCKET
    if not path.exists() or running_launcher(run_dir) is None:
        raise PeerLost(f"no system runs in {run_dir}; start one with `dflash-up up`")
    with ClientLink(Endpoint(ipc(path))) as link:
        link.connect(CONNECT_S)
        link.send(Order(request="1", verb=verb, arguments=arguments))
        report = link.recv(timeout_s)
    if not isinstance(report, Report):
        raise DFlashError(f"order {verb}: expected Report, got {type(report).__name__}")
    if not report.ok:
        raise from_wire(report.code, report.body)
    body: dict[str, Any] = json.loads(report.body)
    return body


async def _answer(router: AsyncRouter, peer: bytes, order: Order, supervisor: Supervisor) -> None:
    try:
        body = await _obey(order, supervisor)
        report = Report(request=order.request, ok=True, code="", body=json.dumps(body))
    except DFlashError as error:
        report = Report(request=order.request, ok=False, code=error.code, body=str(error))
    router.send(peer, report)


async def _obey(order: Order, supervisor: Supervisor) -> Mapping[str, Any]:
    match order.verb:
        case "ps":
            return supervisor.snapshot()
        case "scale":
            changed: list[str] = []
            for role, n_wanted in order.arguments.items():
                if not isinstance(n_wanted, int):
                    raise BadRequest(f"scale {role}={n_wanted!r}; it must be a whole number")
                changed += await scale(supervisor, role, n_wanted)
            return {"changed": changed}
        case "restart":
            await restart(supervisor, str(order.arguments.get("name")))
            return {}
        case "drain":
            await drain(supervisor, str(order.arguments.get("name")))
            return {}
        case "down":
            supervisor.end()
            return {}
        case _:
            raise BadRequest(f"order {order.verb!r}; known: ps, scale, restart, drain, down")
