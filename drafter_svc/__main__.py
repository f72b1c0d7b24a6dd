"""`python -m drafter_svc --run-dir DIR --name drafter.1`: the drafter process."""

import sys
from pathlib import Path

import click

from common.checkpoint.blas import load_openblas

BLAS = load_openblas()  # before anything below imports MLX

from common.checkpoint.device import choose_device  # noqa: E402
from common.config import environment  # noqa: E402
from common.errors import ConfigError  # noqa: E402
from common.net.startup import Worker, run_worker  # noqa: E402
from common.wire.messages import Ready, Scalar  # noqa: E402
from drafter_svc.drafter import load_drafter  # noqa: E402
from drafter_svc.service import DrafterService  # noqa: E402


def serve(worker: Worker) -> int:
    """Load, introduce, warm up, and draft until the end."""
    config = worker.process.config
    device = choose_device(config.drafter.device)
    folder = config.drafter_path
    if folder is None:
        raise ConfigError("model.drafter: not set; name the drafter's checkpoint folder")
    worker.progress("load", 0.0)
    drafter = load_drafter(folder, config.model.target_path)
    worker.introduce(drafter.card)
    worker.progress("warm-up", 0.0)
    drafter.warm_up()
    worker.progress("warm-up", 1.0)
    shell = worker.shell
    actor = DrafterService(drafter, shell.send, shell.dial)
    notes: dict[str, Scalar] = {
        "blas": BLAS.note,
        "blas_threads": environment().get("OPENBLAS_NUM_THREADS", ""),
    }
    if drafter.prior is not None:
        notes |= {
            "prior_intercept": drafter.prior.intercept,
            "prior_slope": drafter.prior.slope,
        }
    shell.report(Ready(config.drafter.capacity, device=device, notes=notes))
    return shell.run(actor)


@click.command()
@click.option("--run-dir", required=True, type=click.Path(path_type=Path))
@click.option("--name", required=True)
def main(run_dir: Path, name: str) -> None:
    sys.exit(run_worker("drafter", run_dir, name, serve))


if __name__ == "__main__":
    main()
