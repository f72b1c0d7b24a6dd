"""`python -m common.gateway --run-dir DIR --name gateway`: the HTTP process."""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from common import log
from common.config import load_resolved
from common.errors import AddressInUse, ConfigError, DFlashError
from common.gateway.listen import Listen, listen_of, read_keys, say_ready
from common.settings import Config

logger = logging.getLogger("common.gateway")

LOOK_S: Final = 1.0  # between two looks at the launcher
GRACE_S: Final = 5.0  # for replies that are being written when it ends
EMBEDDED: Final = "dflash-up-demo"


def model_name(config: Config) -> str:
    """What the target is called: as configured, else its folder, else the embedded pair."""
    if config.http.model:
        return config.http.model
    return Path(config.model.target).expanduser().name if config.model.target else EMBEDDED


@contextlib.contextmanager
def bound(listen: Listen) -> Iterator[socket.socket]:
    """A listening socket.

    Raises:
        AddressInUse: somebody else listens there.
        ConfigError: this machine has no such address.
    """
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((listen.host, listen.port))
            made.listen(128)
        except OSError as error:
            kind = AddressInUse if error.errno == errno.EADDRINUSE else ConfigError
            sentence = f"http.listen: {listen.host}:{listen.port}: {error.strerror}"
            raise kind(f"{sentence}; choose another address") from error
        made.setblocking(False)
        yield made


async def serve(config: Config, run_dir: Path) -> None:
    """Serve until a signal, or until the launcher is gone."""
    import uvicorn  # noqa: PLC0415  # an extra: what is missing is said by `main`

    from common.gateway.app import Gateway  # noqa: PLC0415
    from common.sdk import AsyncClient  # noqa: PLC0415

    listen = listen_of(config.http)
    keys = read_keys(config.http)
    with bound(listen) as made:
        async with AsyncClient(run_dir=run_dir) as client:
            app = Gateway(client, model_name(config), keys).app()
            settings = uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=int(GRACE_S),
            )
            server = uvicorn.Server(settings)
            watcher = asyncio.create_task(_end_with(os.getppid(), server))
            say_ready(run_dir, os.getpid())
            logger.info("listening on http://%s:%d", listen.host, listen.port)
            await server.serve(sockets=[made])
            watcher.cancel()


async def _end_with(parent_pid: int, server: "object") -> None:
    while os.getppid() == parent_pid:
        await asyncio.sleep(LOOK_S)
    server.should_exit = True  # type: ignore[attr-defined]  # uvicorn's own way to end


@click.command()
@click.option("--run-dir", required=True, type=click.Path(path_type=Path))
@click.option("--name", required=True)
def main(run_dir: Path, name: str) -> None:
    """Serve HTTP in front of the coordinator of a run."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until uvicorn has its own
    log.set_up(name)
    try:
        config = load_resolved(run_dir)
        log.set_up(name, config.run.log_level, as_json=config.run.log_json)
        asyncio.run(serve(config, run_dir))
    except ModuleNotFoundError as error:
        logger.error("%s is missing; pip install 'dflash-up[http]'", error.name)
        sys.exit(ConfigError.exit_code)
    except DFlashError as fault:
        logger.error("%s", fault)
        sys.exit(fault.exit_code)


if __name__ == "__main__":
    main()
