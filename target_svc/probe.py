"""`python -m target_svc.probe`: what a verify costs on this device, by rows, context and build.

Owns the order of measurements and their table. Does not know how any of it is computed: it opens
sessions as the service does. Writes its JSON after every measurement, so an interrupted run keeps
what it has. Arms of a comparison take turns A B B A; a figure is the median of its runs.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import click

from common.checkpoint.blas import load_openblas

load_openblas()  # before anything below imports MLX

import mlx.core as mx  # noqa: E402

from common.checkpoint.device import choose_device  # noqa: E402
from common.sources import NONE  # noqa: E402
from common.wire.messages import Sampling  # noqa: E402
from target_svc.build import BuildPlan  # noqa: E402
from target_svc.engine import Engine  # noqa: E402
from target_svc.load import EngineOptions, load_engine  # noqa: E402
from target_svc.models.qwen4_exp import Model  # noqa: E402
from target_svc.random_checkpoint import Sizes, write_checkpoint  # noqa: E402
from target_svc.session import Session  # noqa: E402
from target_svc.verify import Verdict, VerifyPlan  # noqa: E402

MIB: Final = 1 << 20
_STRETCH: Final = 8  # plain rounds timed together
#: (pipeline_layers or -1 for the chosen number, is_deferred) of the four build modes.
MODES: Final = ((0, False), (0, True), (-1, False), (-1, True))


class Probe:
    """One loaded target and the figures so far.

    Args:
        engine: loaded.
        out: where the JSON goes.
        budget_s: no measurement is begun after so long.
        repeats: A B B A quads of a comparison, and half the runs of a single figure.
    """

    def __init__(self, engine: Engine, out: Path, budget_s: float, repeats: int) -> None:
        self.figures: dict[str, Any] = {}
        self._engine = engine
        self._out = out
        self._until = time.monotonic() + budget_s
        self._repeats = repeats

    def save(self, key: str, value: Any) -> None:
        """Add one figure and write the file."""
        self.figures[key] = value
        self._out.write_text(json.dumps(self.figures, indent=1))

    def run(self, contexts: Sequence[int], rows: Sequence[int], layers: int) -> None:
        """Measure everything there is time for, the most wanted first."""
        for context in contexts:
            if self._is_late():
                return
            for overlaps in (False, True):
                self._prefilled(context, overlaps=overlaps).close()
            session = self._prefilled(context, overlaps=False)
            for count in rows:
                self._warm(session, count)
            self.save(f"ladder.{context}", {r: self._ladder(session, r) for r in rows})
            self.save(f"peak_mib.{context}", self._peak(session, min(8, max(rows))))
            self._compare(session, context, [r for r in (8, 1, 16) if r in rows], layers)
            self.save(f"direct.{context}", self._direct(session, layers))
            session.close()
        self.save("experts_ms", {count: self._experts(count) for count in rows})

    def _prefilled(self, context: int, *, overlaps: bool) -> Session:
        """A session after a prompt of `context` tokens; saves tokens per second."""
        own = self._engine.plan
        self._engine.plan = replace(own, overlaps=overlaps)
        session = self._engine.open(Sampling(), taps=False)
        vocab = self._engine.card.vocab_size
        begun, chunk_s = time.perf_counter(), []
        for _ in session.prefill([1 + (31 * index) % (vocab - 1) for index in range(context)]):
            chunk_s.append(time.perf_counter() - begun)
            begun = time.perf_counter()
        chunk = self._engine.prefill_chunk
        self._engine.plan = own
        self.save(
            f"prefill.{context}{'.overlapped' if overlaps else ''}",
            {
                "tokens_per_s": context / sum(chunk_s),
                "chunk": chunk,
                "last_chunks_tokens_per_s": chunk / statistics.median(chunk_s[-4:-1] or chunk_s),
                "first_chunk_s": chunk_s[0],
            },
        )
        return session

    def _warm(self, session: Session, rows: int) -> None:
        """Kernels of this width are compiled, and the session expects it next."""
        for is_prepared in (False, True, False):
            self._round(session, rows, is_prepared=is_prepared)

    def _round(self, session: Session, rows: int, *, is_prepared: bool) -> tuple[float, Verdict]:
        """Milliseconds of one verify of drafts that are wrong, from ids to verdict."""
        vocab = self._engine.card.vocab_size
        drafts = [(session.anchor_id + 17 * row) % vocab for row in range(1, rows)]
        if is_prepared:
            session.prepare(rows)
        begun = time.perf_counter()
        verdict = session.verify(drafts, rows)
        return (time.perf_counter() - begun) * 1e3, verdict

    def _ladder(self, session: Session, rows: int) -> dict[str, float]:
        """Median milliseconds at the process's own plan, as the service runs it."""
        self._round(session, rows, is_prepared=False)
        runs = [self._round(session, rows, is_prepared=True)[0] for _ in range(4 * self._repeats)]
        return {"ms": statistics.median(runs), "least": min(runs)}

    def _peak(self, session: Session, rows: int) -> dict[str, float]:
        """Memory that one verify needs beyond what is held before it, in MiB."""
        self._round(session, rows, is_prepared=False)
        mx.synchronize()
        mx.clear_cache()
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        self._round(session, rows, is_prepared=True)
        beyond = mx.get_peak_memory() - held
        return {"rows": rows, "beyond": beyond / MIB, "held": held / MIB}

    def _experts(self, rows: int) -> float:
        """Milliseconds of all layers' experts alone: what more rows must cost."""
        model = self._engine.model
        if not isinstance(model, Model):
            return 0.0
        x = mx.random.normal((rows, model.facts.hidden)).astype(model.dtype)
        mx.eval(x)

        def once() -> None:
            mx.eval([layer.experts(x) for layer in model.layers])

        once()
        return _median_ms(once, 4 * self._repeats)

    # ------------------------------------------------------------------ the build modes

    def _compare(self, session: Session, context: int, rows: Sequence[int], layers: int) -> None:
        """The four modes, each without and with a graph that stands ready."""
        own = self._engine.plan
        arms = [
            (BuildPlan(layers if pipeline else 0, is_deferred), is_prepared)
            for pipeline, is_deferred in MODES
            for is_prepared in (False, True)
        ]
        for count in rows:
            seen: dict[str, list[dict[str, float]]] = {}
            for _ in range(self._repeats):
                if self._is_late():
                    break
                for plan, is_prepared in (*arms, *reversed(arms)):
                    self._engine.plan = VerifyPlan(own.width, plan)
                    self._round(session, count, is_prepared=False)
                    name = f"{plan.name}{' prebuilt' if is_prepared else ''}"
                    seen.setdefault(name, []).append(self._arm(session, count, is_prepared))
            medians = {
                name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
                for name, runs in seen.items()
            }
            self.save(f"modes.{context}.{count}", medians)
        self._engine.plan = own

    def _arm(self, session: Session, rows: int, is_prepared: bool) -> dict[str, float]:
        begun = time.perf_counter()
        ms, verdict = self._round(session, rows, is_prepared=is_prepared)
        prepare_ms = (time.perf_counter() - begun) * 1e3 - ms
        return {
            "ms": ms,
            "first_ms": verdict.first_ms,
            "build_ms": verdict.build_ms,
            "prepare_ms": prepare_ms,
        }

    def _direct(self, session: Session, layers: int) -> dict[str, float]:
        """Milliseconds of plain rounds one after another, nothing awaited between them."""
        own = self._engine.plan
        plans = [VerifyPlan(own.width, BuildPlan(count)) for count in (0, layers)]
        plans.append(replace(plans[-1], overlaps=True))
        seen: dict[str, list[float]] = {}
        for plan in (*plans, *reversed(plans)) * self._repeats:
            self._engine.plan = plan
            session.verify((), 1)
            begun = time.perf_counter()
            for _ in range(_STRETCH):
                session.verify((), 1)
            name = plan.build.name + (" overlapped" if plan.overlaps else "")
            seen.setdefault(name, []).append((time.perf_counter() - begun) * 1e3 / _STRETCH)
        self._engine.plan = own
        return {name: statistics.median(runs) for name, runs in seen.items()}

    def _is_late(self) -> bool:
        return time.monotonic() > self._until


def table(figures: dict[str, Any]) -> Iterator[str]:
    """Lines for people."""
    for key, value in figures.items():
        if key.startswith("ladder"):
            cells = "  ".join(f"{rows}: {one['ms']:.2f}" for rows, one in value.items())
            yield f"{key:14} ms by rows   {cells}"
        elif key.startswith("modes"):
            yield f"{key}"
            for name, one in value.items():
                cells = "  ".join(f"{field} {ms:6.2f}" for field, ms in one.items())
                yield f"    {name:36} {cells}"
        else:
            yield f"{key:14} {value}"


def _median_ms(action: Callable[[], None], count: int) -> float:
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        action()
        times.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(times)


@contextmanager
def _folder(checkpoint: Path | None, sizes: Sizes, figures: dict[str, Any]) -> Iterator[Path]:
    if checkpoint is not None:
        yield checkpoint
        return
    with tempfile.TemporaryDirectory(prefix="probe-") as made:
        begun = time.perf_counter()
        figures["sizes"] = asdict(sizes)
        figures["weights"] = write_checkpoint(Path(made), sizes)
        figures["write_s"] = time.perf_counter() - begun
        mx.clear_cache()
        yield Path(made)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


@click.command()
@click.option("--checkpoint", type=click.Path(path_type=Path), help="A real one, not random.")
@click.option("--layers", default=8, show_default=True)
@click.option("--hidden", default=2560, show_default=True)
@click.option("--experts", default=40, show_default=True)
@click.option("--value-heads", default=48, show_default=True)
@click.option("--expert-width", default=640, show_default=True)
@click.option("--head-dim", default=256, show_default=True)
@click.option("--vocab", default=32_768, show_default=True)
@click.option("--contexts", default="1024,16384", show_default=True)
@click.option("--rows", default="1,2,4,8,16", show_default=True)
@click.option("--chunk", default=512, show_default=True, help="Prompt tokens per forward.")
@click.option("--pipeline-layers", default=4, show_default=True)
@click.option("--repeats", default=5, show_default=True, help="A B B A quads of each comparison.")
@click.option("--seconds", default=150.0, show_default=True, help="Begin nothing after so long.")
@click.option("--device", default="auto", show_default=True)
@click.option("--out", default="probe.json", type=click.Path(path_type=Path), show_default=True)
def main(
    checkpoint: Path | None,
    contexts: str,
    rows: str,
    chunk: int,
    pipeline_layers: int,
    repeats: int,
    seconds: float,
    device: str,
    out: Path,
    **sizes: int,
) -> None:
    """Measure verifies of a random `qwen4_exp` of these sizes, or of a checkpoint."""
    wanted = _numbers(contexts)
    figures: dict[str, Any] = {"device": choose_device(device)}
    chosen = Sizes(**sizes, context=max(wanted) + 4096)
    with _folder(checkpoint, chosen, figures) as folder:
        begun = time.perf_counter()
        engine = load_engine(folder, None, EngineOptions(prefill_chunk=chunk, source=NONE))
        probe = Probe(engine, out, seconds, repeats)
        for key, value in figures.items():
            probe.save(key, value)
        probe.save("load_s", time.perf_counter() - begun)
        probe.save("plan", engine.plan.build.name)
        probe.run(wanted, _numbers(rows), pipeline_layers)
    for line in table(probe.figures):
        click.echo(line)


if __name__ == "__main__":
    main()
