"""One log format for every process, and the request id that travels with a line.

Owns the format and the handler. Does not know who logs or where the stream leads.
Text: `12:03:04.120 drafter.1 | info message [request]`. Prompts and keys are never logged.
"""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Final, TextIO

LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

_request: ContextVar[str] = ContextVar("request", default="")


@contextmanager
def of_request(request: str) -> Iterator[None]:
    """Put `request` on every line logged inside this block."""
    token = _request.set(request)
    try:
        yield
    finally:
        _request.reset(token)


class TextFormatter(logging.Formatter):
    """`time name | level message [request]`, one line a record (and its traceback, if any)."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.process_name = name

    def format(self, record: logging.LogRecord) -> str:
        """Format one record."""
        stamp = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        request = _request.get()
        tail = f" [{request}]" if request else ""
        line = (
            f"{stamp} {self.process_name} | {record.levelname.lower()} {record.getMessage()}{tail}"
        )
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, name, level, logger, message, request, traceback."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.process_name = name

    def format(self, record: logging.LogRecord) -> str:
        """Format one record."""
        body: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created).astimezone().isoformat(),
            "name": self.process_name,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request := _request.get():
            body["request"] = request
        if record.exc_info:
            body["traceback"] = self.formatException(record.exc_info)
        return json.dumps(body)


def set_up(
    name: str, level: str = "info", *, as_json: bool = False, stream: TextIO | None = None
) -> None:
    """Send this process's log to `stream` (stderr), replacing earlier handlers.

    Args:
        name: the process's name, "drafter.1".
        level: "debug", "info", "warning" or "error".
        as_json: JSON lines instead of text.
        stream: where lines go; None is stderr.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(name) if as_json else TextFormatter(name))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(LEVELS[level])
