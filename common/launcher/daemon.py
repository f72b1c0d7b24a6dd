"""The launcher in the background: `python -m common.launcher.daemon RUN_DIR`, by `up -d`.

Reads one JSON object from its input (tables, origins, roles) and keeps that run. What goes wrong
before the run folder is claimed goes to the starter; after that everything goes to its log.
"""

import asyncio
import json
import logging
import os
import sys
from typing import Any

from common import log
from common.config import Resolved, load
from common.errors import DFlashError
from common.launcher.launch import launched, signals_to
from common.launcher.rundir import LAUNCHER_NAME, RunDir
from common.launcher.status import Row

logger = logging.getLogger(__name__)


def main() -> None:
    """Keep one run until it is told to end."""
    body = json.load(sys.stdin)
    tables = body["tables"].items()
    flags = {f"{table}.{key}": value for table, keys in tables for key, value in keys.items()}
    resolved = Resolved(load(None, flags, {}).config, body["origins"])
    log.set_up(LAUNCHER_NAME)
    try:
        sys.exit(asyncio.run(_keep(resolved, tuple(body["roles"]))))
    except DFlashError as error:
        logger.error("%s", " ".join(str(error).split()))
        sys.exit(error.exit_code)


async def _keep(resolved: Resolved, roles: tuple[str, ...]) -> int:
    states: dict[str, tuple[str, int]] = {}

    def note(rows: list[Row], status: Any) -> None:
        for row in rows:
            mark = ("ready" if row.state == "busy" else row.state, row.restarts)
            if states.get(row.name) != mark:
                states[row.name] = mark
                logger.info("%s: %s %s", row.name, row.state, row.last_error)

    async with launched(resolved, roles, note) as (supervisor, run, run_dir):
        _speak_into(run_dir, resolved)
        with signals_to([supervisor]):
            return await run


def _speak_into(run_dir: RunDir, resolved: Resolved) -> None:
    """Lead this process's output into its log file, and let go of the starter's terminal."""
    target = os.open(run_dir.logs / f"{LAUNCHER_NAME}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(target, descriptor)
    os.close(target)
    run = resolved.config.run
    log.set_up(LAUNCHER_NAME, run.log_level, as_json=run.log_json)


if __name__ == "__main__":
    main()
