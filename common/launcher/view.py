"""What an operator sees: start-up lines, the `ps` table, tokens in colour, closing tables.

Owns texts and colours. Does not know processes or sockets: rows and events are passed in.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, TextIO

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from common.config import environment
from common.launcher.status import Row
from common.sdk import EndEvent, TokenEvent
from common.sources import DRAFTER, MTP

ACCEPTED_COLOUR: Final = "green"  # accepted drafts; the target's own tokens stay plain
STEPS: Final = 4  # a phase is reported at every quarter
PIPE_WIDTH: Final = 160  # columns where there is no terminal to ask


def wants_colour(choice: str, stream: TextIO) -> bool:
    """Whether to colour: `always`, `never`, or on a terminal unless NO_COLOR is set."""
    if choice == "auto":
        return stream.isatty() and not environment().get("NO_COLOR")
    return choice == "always"


class StartupView:
    """Prints a line whenever a process gets on; called with the rows of every look."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._began_s = time.monotonic()
        self._seen: dict[str, tuple[object, ...]] = {}
        self._mode = ""

    def __call__(self, rows: list[Row], status: Mapping[str, Any]) -> None:
        """Take one look at all processes."""
        for row in rows:
            key = (row.state in ("ready", "busy"), row.state, row.phase, int(row.done * STEPS))
            settled = row.state in ("ready", "busy")
            mark = ("up", row.restarts) if settled else key
            if self._seen.get(row.name) != mark:
                self._seen[row.name] = mark
                self._say(row.name, describe(row))
        mode = serving_mode(rows)
        if mode != self._mode and mode:
            self._say("", mode)
        self._mode = mode

    def _say(self, name: str, text: str) -> None:
        took = time.monotonic() - self._began_s
        click.echo(f"{took:6.1f} s  {name:<12} {text}".rstrip(), file=self._stream)


def describe(row: Row) -> str:
    """The state of one process in a few words."""
    if row.state == "starting":
        note = f" ({row.note})" if row.note else ""
        return f"{row.phase} {row.done:.0%}{note}" if row.phase else f"starting (pid {row.pid})"
    if row.state in ("ready", "busy"):
        facts = [row.device, *(f"{name} {value}" for name, value in row.notes.items())]
        known = ", ".join(fact for fact in facts if fact)
        return f"ready{f' ({known})' if known else ''}"
    if row.last_error and row.state in ("waiting", "given up", "gone"):
        return f"{row.state}: {row.last_error}"
    return row.state


def serving_mode(rows: Sequence[Row]) -> str:
    """What clients get now: nothing, plain decode, or drafting."""
    up = [row for row in rows if row.state in ("ready", "busy")]
    sources = {row.notes.get("source", DRAFTER) for row in up if row.role == "target"}
    if not sources:
        return ""
    has_drafter = any(row.role == "drafter" for row in up)
    drafts = MTP in sources or (DRAFTER in sources and has_drafter)
    return "serving, drafting" if drafts else "serving, plain decode"


def ps_table(snapshot: Mapping[str, Any]) -> Table:
    """The table of `dflash-up ps`."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("NAME", "PID", "STATE", "UPTIME", "RESTARTS", "DEVICE", "SESSIONS", "RSS"):
        table.add_column(column, no_wrap=True)
    table.add_column("BUILD", no_wrap=True)
    table.add_column("LAST ERROR")
    for row in snapshot["processes"]:
        state = row["state"] if row["state"] != "starting" else f"{row['phase'] or 'starting'}"
        table.add_row(
            row["name"],
            str(row["pid"] or "-"),
            state,
            f"{row['uptime_s']:.0f} s",
            str(row["restarts"]),
            row["device"] or "-",
            f"{row['sessions']}/{row['capacity']}" if row["capacity"] else "-",
            f"{row['rss_bytes'] / 2**20:.0f} MB" if row["rss_bytes"] else "-",
            _built(row.get("notes", {})),
            row["last_error"] or _refused(row.get("notes", {})),
        )
    return table


def _built(notes: Mapping[str, Any]) -> str:
    """How a target builds its forwards, from its notes."""
    ahead = " ahead" if notes.get("prebuild", "off") != "off" else ""
    return f"{notes['build']}{ahead}" if "build" in notes else "-"


def _refused(notes: Mapping[str, Any]) -> str:
    """What a target cannot do although it is ready."""
    return f"drafting off: {notes['drafting off']}" if "drafting off" in notes else ""


def show(table: Table, stream: TextIO | None = None) -> None:
    """Print a table; wide when nobody's terminal says how wide."""
    stream = stream or sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else PIPE_WIDTH)
    console.print(table)


def write_tokens(event: TokenEvent | EndEvent, stream: TextIO, *, colour: bool) -> None:
    """Write the text of an event; accepted drafts in colour, the target's own tokens plain."""
    if isinstance(event, EndEvent) or not colour:
        stream.write(event.text)
    else:
        drafted = "".join(event.pieces[: event.n_accepted])
        own = "".join(event.pieces[event.n_accepted :])
        stream.write((click.style(drafted, fg=ACCEPTED_COLOUR) if drafted else "") + own)
    stream.flush()


def summary(stats: Mapping[str, Any], n_tokens: int) -> str:
    """One line about a finished request."""
    drafted = f"{stats.get('drafts_accepted', 0)} of {stats.get('drafts_sent', 0)} drafts accepted"
    return (
        f"{n_tokens} tokens, {stats.get('tokens_per_s', 0):.1f} tokens/s, first after "
        f"{stats.get('ttft_s', 0):.2f} s, {drafted}, "
        f"acceptance length {stats.get('acceptance_length', 0):.2f}, "
        f"{stats.get('rounds', 0)} rounds ({stats.get('plain_rounds', 0)} plain)"
    )


def histogram(rows: Mapping[str, int] | Sequence[int]) -> str:
    """A rows histogram in a line: `1:3 5:10` reads three rounds of one row, ten of five."""
    pairs = rows.items() if isinstance(rows, Mapping) else enumerate(rows)
    return " ".join(f"{width}:{count}" for width, count in pairs if count) or "-"
