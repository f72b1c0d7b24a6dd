"""What runs were measured, and what that says: medians, spread, comparisons.

Owns the arithmetic and the table of `bench` and `demo`. Does not know how a run is made.
Invariant: an arm's figure for a file is the mean of its runs there, so that a drift of the machine
falls on all arms alike; an arm's figure is the median over files.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from common.launcher.view import histogram


@dataclass(frozen=True, slots=True)
class Run:
    """One reply of one arm to one file."""

    arm: str
    file: str
    token_ids: tuple[int, ...]
    tokens_per_s: float
    ttft_s: float
    rounds: int
    stats: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ms_per_round(self) -> float:
        """Time from the first to the last token, shared out over the rounds between them."""
        if not self.rounds or not self.tokens_per_s:
            return 0.0
        return (len(self.token_ids) - 1) / self.tokens_per_s * 1000.0 / self.rounds


@dataclass(frozen=True, slots=True)
class Summary:
    """One arm over all files."""

    arm: str
    tokens_per_s: float  # median over files
    low: float  # lower quartile over files
    high: float  # upper quartile
    ttft_s: float  # median over files
    ms_per_round: float  # median over files
    acceptance_length: float  # median over runs that drafted; 0 where nothing was drafted
    plain_share: float  # of all rounds
    rows: Mapping[str, int]  # rounds by rows verified, all files
    near_ties: int
    n_same: int  # files whose ids equal those of the reference arm
    by_file: Mapping[str, float]  # tokens/s of each file


def summarize(runs: Sequence[Run], reference: str) -> list[Summary]:
    """One summary per arm, in the order in which arms first ran."""
    arms = list(dict.fromkeys(run.arm for run in runs))
    texts = {run.file: run.token_ids for run in runs if run.arm == reference}
    return [_summary(arm, [run for run in runs if run.arm == arm], texts) for arm in arms]


def speed_table(summaries: Sequence[Summary], n_files: int, title: str = "") -> Table:
    """A line per arm; the factor is against the first arm."""
    table = Table(title=title or None, box=SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table.add_column("arm")
    names = (
        "tokens/s",
        "quartiles",
        "factor",
        "ms/round",
        "acceptance",
        "plain rounds",
        "first token",
    )
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("rounds by rows")
    table.add_column("same text", justify="right")
    first = summaries[0].tokens_per_s if summaries else 0.0
    for one in summaries:
        table.add_row(
            one.arm,
            f"{one.tokens_per_s:.1f}",
            f"{one.low:.1f}..{one.high:.1f}",
            f"{one.tokens_per_s / first:.2f}x" if first else "-",
            f"{one.ms_per_round:.2f}",
            f"{one.acceptance_length:.2f}" if one.acceptance_length else "-",
            f"{one.plain_share:.0%}",
            f"{one.ttft_s * 1000:.0f} ms",
            histogram(one.rows),
            f"{one.n_same}/{n_files}" + (f", {one.near_ties} near-ties" if one.near_ties else ""),
        )
    return table


def verdict(summaries: Sequence[Summary], drafted: str = "adaptive") -> str:
    """Drafted against the faster of the arms that draft nothing, file by file, in a sentence."""
    speed = {one.arm: one.by_file for one in summaries}
    without = [speed[arm] for arm in ("direct", "plain") if arm in speed]
    if not without or drafted not in speed:
        return ""
    factors = {
        file: rate / max(arm[file] for arm in without) for file, rate in speed[drafted].items()
    }
    worst = min(factors, key=lambda file: factors[file])
    return (
        f"drafted ({drafted}) against the faster arm without drafts, file by file: "
        f"median {statistics.median(factors.values()):.2f}x, "
        f"least {factors[worst]:.2f}x ({worst}), most {max(factors.values()):.2f}x"
    )


def _summary(arm: str, runs: Sequence[Run], texts: Mapping[str, tuple[int, ...]]) -> Summary:
    by_file: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_file[run.file].append(run)
    by_name = {
        file: statistics.fmean(run.tokens_per_s for run in group) for file, group in by_file.items()
    }
    speeds = list(by_name.values())
    quartiles = statistics.quantiles(speeds, n=4) if len(speeds) > 1 else speeds * 3
    n_rounds = sum(int(run.stats.get("rounds", run.rounds)) for run in runs)
    n_plain = sum(int(run.stats.get("plain_rounds", run.rounds)) for run in runs)
    return Summary(
        arm=arm,
        tokens_per_s=statistics.median(speeds),
        low=quartiles[0],
        high=quartiles[2],
        ttft_s=_median_over_files(by_file, "ttft_s"),
        ms_per_round=_median_over_files(by_file, "ms_per_round"),
        acceptance_length=_acceptance(runs),
        plain_share=n_plain / n_rounds if n_rounds else 0.0,
        rows=_rows(runs),
        near_ties=sum(int(run.stats.get("near_ties", 0)) for run in runs),
        n_same=sum(
            all(run.token_ids == texts.get(file) for run in group)
            for file, group in by_file.items()
        ),
        by_file=by_name,
    )


def _median_over_files(by_file: Mapping[str, Sequence[Run]], name: str) -> float:
    return statistics.median(
        statistics.fmean(getattr(run, name) for run in group) for group in by_file.values()
    )


def _acceptance(runs: Sequence[Run]) -> float:
    drafted = [run.stats for run in runs if run.stats.get("drafted_rounds")]
    lengths = [float(stats["acceptance_length"]) for stats in drafted]
    return statistics.median(lengths) if lengths else 0.0


def _rows(runs: Sequence[Run]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for run in runs:
        rows = run.stats.get("rows_histogram", {})
        pairs = rows.items() if isinstance(rows, Mapping) else enumerate(rows)
        total.update({str(width): int(count) for width, count in pairs})
    return dict(sorted(total.items(), key=lambda pair: int(pair[0])))
