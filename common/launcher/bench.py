"""`dflash-up bench`: direct, plain, fixed and adaptive over the held-out files.

Owns the arms and the order of runs. Does not know how figures are made of runs (`tally`).
`direct` is the target's own loop in one process, the wire left out; `plain` and `adaptive` are one
running system, `fixed` is a second one with that policy. Only the one under test gets requests;
an idle one waits on its sockets. Runs are interleaved A B B A, so that drift falls on all alike.
"""

import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import click

from common.config import Resolved, environment
from common.errors import BadRequest, DFlashError
from common.launcher.flags import config_options, resolve
from common.launcher.launch import private, with_systems
from common.launcher.plan import DRAFTER, TARGET, blas_threads, check_models, plan
from common.launcher.tally import Run, speed_table, summarize, verdict
from common.launcher.view import StartupView, show
from common.sdk import Client, Completion
from common.settings import Config

ARMS: Final = ("direct", "plain", "fixed", "adaptive")
PROMPTS: Final = Path(__file__).resolve().parents[1] / "demo" / "prompts"
WARM_UP_TOKENS: Final = 16

Ask = Callable[[str, int], Run]  # (text, max_tokens) -> a Run without its file's name


@click.command("bench")
@config_options
@click.option("--max-tokens", type=click.IntRange(2), default=256, show_default=True)
@click.option("--files", "n_files", type=click.IntRange(1), default=None, help="Only the first N.")
@click.option("--prompts", type=click.Path(path_type=Path), help="Folder of *.txt, not ours.")
@click.option("--arms", default=",".join(ARMS), show_default=True, help="Which arms, in order.")
@click.option("--out", type=click.Path(path_type=Path), help="Write runs and summary as JSON.")
def command(
    max_tokens: int,
    n_files: int | None,
    prompts: Path | None,
    arms: str,
    out: Path | None,
    **flags: Any,
) -> None:
    """Compare drafted with plain decode on this machine."""
    resolved = resolve(**flags)
    wanted = _arms(arms)
    folder, names = (PROMPTS, "*.py.txt") if prompts is None else (prompts, "*.txt")
    files = sorted(folder.glob(names))[:n_files]
    if not files:
        raise BadRequest(f"--prompts {folder}: no prompt files there; they are named {names}")
    settings = describe_settings(resolved.config)
    click.echo(settings)
    runs = _measure(resolved, wanted, files, max_tokens)
    if runs is None:
        raise KeyboardInterrupt
    summaries = summarize(runs, reference=wanted[0])
    show(speed_table(summaries, len(files)))
    click.echo(verdict(summaries))
    if out is not None:
        body = {
            "settings": settings,
            "max_tokens": max_tokens,
            "summary": [asdict(summary) for summary in summaries],
            "runs": [asdict(run) for run in runs],
        }
        out.write_text(json.dumps(body, indent=1), encoding="utf-8")


def interleave(arms: Sequence[str]) -> list[str]:
    """The order of runs on one file: there and back again."""
    return [*arms, *reversed(arms)]


def describe_settings(config: Config) -> str:
    """Machine, versions and BLAS threads in one line: the conditions of the figures."""
    environ = plan(config, Path())[1].environ
    return (
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, MLX {_version('mlx')}, BLAS threads: target "
        f"{blas_threads(config, TARGET)}, drafter {blas_threads(config, DRAFTER)}, "
        f"OPENBLAS_THREAD_TIMEOUT {environ['OPENBLAS_THREAD_TIMEOUT']}"
    )


def run_of(arm: str, done: Completion) -> Run:
    """A reply of a running system as a measured run."""
    stats = done.stats
    return Run(
        arm=arm,
        file="",
        token_ids=done.token_ids,
        tokens_per_s=float(stats["tokens_per_s"]),
        ttft_s=float(stats["ttft_s"]),
        rounds=int(stats["rounds"]),
        stats=stats,
    )


def _measure(
    resolved: Resolved, arms: Sequence[str], files: Sequence[Path], max_tokens: int
) -> list[Run] | None:
    """Start one system per policy that the arms need, and run them all; None: interrupted."""
    policies = sorted(
        {"fixed" if arm == "fixed" else "adaptive" for arm in arms if arm != "direct"}
    )
    plans = [
        private(resolved, f"bench-{mode}", policy=replace(resolved.config.policy, mode=mode))
        for mode in policies
    ]

    def work(folders: list[Path]) -> list[Run]:
        by_policy = dict(zip(policies, folders, strict=True))
        return _run_all(resolved.config, by_policy, arms, files, max_tokens)

    return asyncio.run(with_systems(plans, work, StartupView))


def _run_all(
    config: Config,
    folders: dict[str, Path],
    arms: Sequence[str],
    files: Sequence[Path],
    max_tokens: int,
) -> list[Run]:
    runs: list[Run] = []
    with ExitStack() as stack:
        asks = {arm: stack.enter_context(_arm(arm, config, folders)) for arm in arms}
        for ask in asks.values():
            ask("import os\n", WARM_UP_TOKENS)
        for number, file in enumerate(files, 1):
            began = time.monotonic()
            text = file.read_text(encoding="utf-8")
            for arm in interleave(arms):
                runs.append(replace(asks[arm](text, max_tokens), file=file.name))
            took = time.monotonic() - began
            click.echo(f"{number}/{len(files)} {file.name}  {took:.1f} s", err=True)
    return runs


@contextmanager
def _arm(arm: str, config: Config, folders: dict[str, Path]) -> Iterator[Ask]:
    if arm == "direct":
        with _direct(config) as ask:
            yield ask
        return
    folder = folders["fixed" if arm == "fixed" else "adaptive"]
    with Client(run_dir=folder) as client:
        yield lambda text, max_tokens: run_of(
            arm, client.generate(text, max_tokens=max_tokens, draft=arm != "plain", ignore_eos=True)
        )


@contextmanager
def _direct(config: Config) -> Iterator[Ask]:
    """The target's own loop in a child that speaks JSON lines."""
    check_models(config)
    environ = next(spec.environ for spec in plan(config, Path()) if spec.role == TARGET)
    process = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "target_svc",
            "direct",
            "--target",
            str(config.model.target_path),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**environment(), **environ},
        text=True,
    )
    requests, replies = process.stdin, process.stdout
    if requests is None or replies is None:
        raise DFlashError("direct: its pipes could not be opened")

    def ask(text: str, max_tokens: int) -> Run:
        requests.write(
            json.dumps({"text": text, "max_tokens": max_tokens, "ignore_eos": True}) + "\n"
        )
        requests.flush()
        line = replies.readline()
        reply: dict[str, Any] = json.loads(line) if line else {"error": "it ended"}
        if "error" in reply:
            raise DFlashError(f"direct: {reply['error']}")
        ids = tuple(reply["token_ids"])
        rounds = max(0, len(ids) - 1)
        return Run("direct", "", ids, reply["tokens_per_s"], reply["first_token_s"], rounds)

    try:
        yield ask
    finally:
        requests.close()
        replies.close()
        process.terminate()
        process.wait(10)


def _arms(text: str) -> list[str]:
    arms = [part.strip() for part in text.split(",")]
    for arm in arms:
        if arm not in ARMS:
            raise BadRequest(f"--arms: {arm!r}; known: {', '.join(ARMS)}")
    return list(dict.fromkeys(arms))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
