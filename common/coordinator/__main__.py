"""`python -m common.coordinator --run-dir DIR --name coordinator`, or `--config FILE`."""

import logging
import sys
from pathlib import Path

import click

from common import log
from common.config import environment, load, load_resolved
from common.coordinator.service import serve
from common.errors import DFlashError
from common.settings import Config

logger = logging.getLogger("common.coordinator")


def config_of(run_dir: Path | None, file: Path | None) -> tuple[Config, Path]:
    """The configuration, and the folder for the control socket."""
    if run_dir is not None and file is None:
        return load_resolved(run_dir), run_dir
    config = load(file, {}, environment()).config
    folder = run_dir or Path(config.run.run_dir or ".").expanduser().absolute()
    return config, folder


@click.command()
@click.option("--run-dir", type=click.Path(path_type=Path), help="folder of the run")
@click.option("--config", "file", type=click.Path(path_type=Path), help="TOML file")
@click.option("--name", default="coordinator", show_default=True)
def main(run_dir: Path | None, file: Path | None, name: str) -> None:
    """Serve until a signal."""
    try:
        log.set_up(name)
        config, folder = config_of(run_dir, file)
        log.set_up(name, config.run.log_level, as_json=config.run.log_json)
        serve(config, folder)
    except DFlashError as fault:
        logger.error("%s", fault)
        sys.exit(fault.exit_code)


if __name__ == "__main__":
    main()
