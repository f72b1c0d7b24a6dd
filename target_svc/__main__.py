"""`python -m target_svc --run-dir DIR --name target.1`, and `python -m target_svc direct`."""

import logging
import sys
from pathlib import Path

import click

from common.checkpoint.blas import load_openblas

BLAS = load_openblas()  # before anything below imports MLX

from common import log  # noqa: E402
from common.checkpoint.device import choose_device  # noqa: E402
from common.checkpoint.index import read_config  # noqa: E402
from common.config import environment  # noqa: E402
from common.errors import ConfigError, DFlashError  # noqa: E402
from common.net.startup import Worker, run_worker  # noqa: E402
from common.settings import PolicyConfig, TargetConfig  # noqa: E402
from common.sources import AUTO, DRAFTER, NONE  # noqa: E402
from common.wire.messages import Ready, Scalar  # noqa: E402
from target_svc.build import DEFERRED, WHOLE  # noqa: E402
from target_svc.direct import serve_lines  # noqa: E402
from target_svc.engine import Engine  # noqa: E402
from target_svc.load import EngineOptions, load_engine  # noqa: E402
from target_svc.models.blocks.linear import holds_packed  # noqa: E402
from target_svc.score import parse_feed, read_ids  # noqa: E402
from target_svc.score import score as score_ids  # noqa: E402
from target_svc.service import TargetService  # noqa: E402
from target_svc.taps import TapPlan  # noqa: E402
from target_svc.verify import VerifyPlan  # noqa: E402

logger = logging.getLogger(__name__)

FIXED_WITHOUT_DRAFTER = 8  # rows of `verify_width = "fixed"` where no drafter names a block


def options_of(
    target: TargetConfig, drafter: Path | None, policy: PolicyConfig | None = None
) -> EngineOptions:
    """Engine options of a configuration; "auto" and 0 leave the choice to the engine.

    Raises:
        ConfigError: two keys contradict each other.
    """
    if target.build == WHOLE and target.pipeline_layers:
        raise ConfigError(
            f"target.pipeline_layers: {target.pipeline_layers} with target.build 'whole'; "
            "leave one of them out"
        )
    width = None
    if target.verify_width == "fixed":
        plan = None if drafter is None else TapPlan.from_config(read_config(drafter))
        width = plan.block_size if plan else FIXED_WITHOUT_DRAFTER
    elif target.verify_width != "auto":
        width = int(target.verify_width)
    return EngineOptions(
        max_context=target.max_context or None,
        prefill_chunk=target.prefill_chunk,
        verify_width=width,
        pipeline_layers=0 if target.build == WHOLE else target.pipeline_layers or None,
        is_deferred=None if target.ple == "auto" else target.ple == DEFERRED,
        prebuilds=None if target.prebuild == "auto" else target.prebuild != "off",
        overlaps=target.prebuild == "overlap",
        keep_packed=None if target.keep_packed == "auto" else target.keep_packed == "on",
        prefix_cache_mb=target.prefix_cache_mb,
        source=_asked_source(policy, drafter),
        copies=policy.copies if policy else AUTO,
    )


def _asked_source(policy: PolicyConfig | None, drafter: Path | None) -> str:
    """Who was asked to draft; a block kept whole every round is asked for by name."""
    if policy is None:
        return AUTO
    demands = policy.mode == "fixed" and policy.source == AUTO and drafter is not None
    return DRAFTER if demands else policy.source


def serve(worker: Worker) -> int:
    """Load, introduce, measure the ladder, and verify until the end."""
    config = worker.process.config
    device = choose_device(config.target.device)
    drafter = config.drafter_path
    worker.progress("load", 0.0)
    options = options_of(config.target, drafter, config.policy)
    engine = load_engine(config.model.target_path, drafter, options)
    worker.introduce(engine.card.wire)
    ladder = warm_up(engine, worker)
    shell = worker.shell
    actor = TargetService(engine, shell.send, config.target.capacity)
    shell.report(
        Ready(
            capacity=config.target.capacity,
            ladder_ms=ladder,
            data_endpoint=shell.data_endpoint,
            data_public_key=shell.data_public_key,
            device=device,
            notes=notes_of(engine),
        )
    )
    return shell.run(actor)


def notes_of(engine: Engine) -> dict[str, Scalar]:
    """What `ps` shows beside the device."""
    return {
        "blas": BLAS.note,
        "blas_threads": environment().get("OPENBLAS_NUM_THREADS", ""),
        "build": engine.plan.build.name,
        "prebuild": _prebuild_of(engine.plan),
        "weights": "packed" if holds_packed(engine.model) else "plain",
        "source": engine.card.armed.source,
        "copies": engine.card.armed.copies,
        **({"drafting off": engine.card.refusal} if engine.card.refusal else {}),
    }


def _prebuild_of(plan: VerifyPlan) -> str:
    if plan.overlaps:
        return "overlap"
    return "on" if plan.prebuilds else "off"


def warm_up(engine: Engine, worker: Worker) -> tuple[float, ...]:
    """Run every width, and return the measured milliseconds of 1, 2, .. rows."""
    worker.progress("warm-up", 0.0)
    ladder = engine.warm_up()
    worker.progress("warm-up", 1.0)
    logger.info("ladder: %s", ", ".join(f"{rows}: {ms:.1f}" for rows, ms in ladder.items()))
    return tuple(ladder[rows] for rows in sorted(ladder))


@click.group(invoke_without_command=True)
@click.option("--run-dir", type=click.Path(path_type=Path))
@click.option("--name", default="target.1", show_default=True)
@click.pass_context
def main(context: click.Context, run_dir: Path | None, name: str) -> None:
    if context.invoked_subcommand is None:
        if run_dir is None:
            raise click.UsageError("--run-dir is missing: the folder that `dflash-up up` made")
        sys.exit(run_worker("target", run_dir, name, serve))


@main.command()
@click.option("--target", required=True, type=click.Path(path_type=Path))
@click.option("--device", default="auto", show_default=True)
def direct(target: Path, device: str) -> None:
    """Answer JSON lines on standard input with the target's own loop."""
    log.set_up("direct", "warning")
    try:
        choose_device(device)
        engine = load_engine(target, None, EngineOptions(source=NONE))
        engine.warm_up([1])
        serve_lines(engine, sys.stdin, sys.stdout)
    except DFlashError as fault:
        logger.error("%s", fault)
        sys.exit(fault.exit_code)


@main.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("ids", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--feed", default="all", show_default=True, help="Rows per forward: all, one, or N.")
@click.option("--device", default="auto", show_default=True)
def score(checkpoint: Path, ids: Path, out: Path, feed: str, device: str) -> None:
    """Write the scores of the tokens in IDS (.npy) to OUT, float32 [N, V], and print their nats."""
    log.set_up("score", "warning")
    try:
        feed_rows, tokens = parse_feed(feed), read_ids(ids)
        choose_device(device)
        model = load_engine(checkpoint, None, EngineOptions(source=NONE)).model
        nats = score_ids(model, tokens, out, feed_rows=feed_rows)
    except DFlashError as fault:
        click.echo(f"error: {fault}", err=True)
        sys.exit(fault.exit_code)
    if nats is None:
        click.echo("1 token; nats per token need two")
    else:
        click.echo(f"{len(tokens)} tokens, {nats:.6f} nats per token")


if __name__ == "__main__":
    main()
