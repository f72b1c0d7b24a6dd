"""The log files of a run: read, merged by time, followed.

Owns their order on a terminal. Does not know what a line says beyond its time.
"""

import heapq
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from common.errors import BadRequest
from common.launcher.rundir import LOGS_DIR, running_launcher

POLL_S: Final = 0.2
STAMP_CHARS: Final = 12  # "12:03:04.120"


class LogReader:
    """Reads what was added to the log files since the last look."""

    def __init__(self, run_dir: Path, name: str | None = None) -> None:
        self._folder = run_dir / LOGS_DIR
        self._name = name
        self._offsets: dict[Path, int] = {}

    def skip(self) -> None:
        """Pass over everything written so far."""
        self._offsets = {path: path.stat().st_size for path in self._paths()}

    def read(self) -> list[str]:
        """New whole lines of all files, by time; a line without a time stays with its leader."""
        return list(heapq.merge(*(self._new_lines(path) for path in self._paths()), key=_stamp))

    def _paths(self) -> list[Path]:
        return sorted(self._folder.glob(f"{self._name or '*'}.log"))

    def _new_lines(self, path: Path) -> list[str]:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offsets[path] = self._offsets.get(path, 0) + len(whole)
        return _grouped(whole.decode(errors="replace").splitlines())


def read_logs(run_dir: Path, name: str | None, *, follow: bool) -> Iterator[str]:
    """Lines of the log files; with `follow`, on until the run ends.

    Raises:
        BadRequest: there is no such log.
    """
    folder = run_dir / LOGS_DIR
    names = sorted(path.stem for path in folder.glob("*.log"))
    if not names or (name is not None and name not in names):
        what = f"log of {name!r}" if name else "log"
        raise BadRequest(f"no {what} in {folder}; there are {', '.join(names) or 'none'}")
    reader = LogReader(run_dir, name)
    yield from reader.read()
    while follow and running_launcher(run_dir) is not None:
        time.sleep(POLL_S)
        yield from reader.read()


def _grouped(lines: list[str]) -> list[str]:
    """Join lines without a time, such as those of a traceback, to the line they belong to."""
    groups: list[str] = []
    for line in lines:
        if groups and not _has_stamp(line):
            groups[-1] += "\n" + line
        else:
            groups.append(line)
    return groups


def _has_stamp(line: str) -> bool:
    return line[2:3] == line[5:6] == ":" or line.startswith("{")


def _stamp(group: str) -> str:
    return group[:STAMP_CHARS]
