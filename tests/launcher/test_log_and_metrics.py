"""One log format; a closed table of metric names."""

import io
import json
import logging

import pytest

from common import log
from common.metrics import NAMES, Metrics


@pytest.fixture
def root_logger():
    root = logging.getLogger()
    kept, level = list(root.handlers), root.level
    yield root
    root.handlers[:] = kept
    root.setLevel(level)


def test_text_line_has_time_name_level_and_request(root_logger):
    """Lines of all processes can be merged and cut by the same columns."""
    stream = io.StringIO()
    log.set_up("drafter.1", "info", stream=stream)
    with log.of_request("r7"):
        logging.getLogger("x").warning("late by %d ms", 3)
    assert stream.getvalue().endswith(" drafter.1 | warning late by 3 ms [r7]\n")
    assert stream.getvalue()[2] == stream.getvalue()[5] == ":"


def test_json_line_is_one_object(root_logger):
    """A log collector reads one object a line, traceback included."""
    stream = io.StringIO()
    log.set_up("target.1", "info", as_json=True, stream=stream)
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("x").exception("failed")
    (line,) = stream.getvalue().splitlines()
    body = json.loads(line)
    assert (body["name"], body["level"], body["message"]) == ("target.1", "error", "failed")
    assert "boom" in body["traceback"]


def test_level_hides_lesser_lines(root_logger):
    """`log_level` is honoured."""
    stream = io.StringIO()
    log.set_up("target.1", "warning", stream=stream)
    logging.getLogger("x").info("not this")
    assert stream.getvalue() == ""


def test_every_declared_metric_can_be_recorded():
    """The names table is the only list; a metric outside of it is a slip."""
    metrics = Metrics()
    for name, (kind, _, labels) in NAMES.items():
        values = dict.fromkeys(labels, "x")
        record = {"counter": metrics.count, "gauge": metrics.gauge, "histogram": metrics.observe}
        record[kind](name, 1.0, **values)
    text = metrics.text()
    assert all(name in text for name in NAMES)
    with pytest.raises(KeyError):
        metrics.count("dflash_unknown")
