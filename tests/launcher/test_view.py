"""What an operator sees."""

import io
from types import SimpleNamespace

import pytest

from common.launcher.bench import interleave
from common.launcher.status import Row, join
from common.launcher.tally import Run, speed_table, summarize, verdict
from common.launcher.view import (
    StartupView,
    histogram,
    ps_table,
    serving_mode,
    wants_colour,
    write_tokens,
)
from common.sdk import EndEvent, TokenEvent


def row(name="target.1", state="starting", **values):
    facts = {"pid": 7, "uptime_s": 1.0, "restarts": 0, **values}
    return Row(name=name, role=name.split(".")[0], state=state, **facts)


def test_start_up_lines_show_phase_and_percent_once_per_step():
    """A wall of equal lines hides the one that matters."""
    stream = io.StringIO()
    view = StartupView(stream)
    for done in (0.0, 0.05, 0.3, 0.31, 0.9):
        view([row(phase="load", done=done)], {})
    view([row(state="ready", device="cpu")], {})
    view([row(state="busy", device="cpu")], {})
    texts = [line[23:] for line in stream.getvalue().splitlines()]
    assert texts == ["load 0%", "load 30%", "load 90%", "ready (cpu)", "serving, plain decode"]


def test_serving_begins_with_a_target_and_upgrades_with_a_drafter():
    """Drafting is an event, not a precondition."""
    target, drafter = row(state="ready"), row("drafter.1", "ready")
    assert serving_mode([drafter]) == ""
    assert serving_mode([target]) == "serving, plain decode"
    assert serving_mode([target, drafter]) == "serving, drafting"


def test_accepted_drafts_are_coloured_and_own_tokens_are_not():
    """The colour shows what drafting did."""
    stream = io.StringIO()
    event = TokenEvent(0, (1, 2, 3), ("a", "b", "c"), 2, "abc")
    write_tokens(event, stream, colour=True)
    write_tokens(EndEvent("!", "stop", {}), stream, colour=True)
    assert stream.getvalue() == "\x1b[32mab\x1b[0mc!"


@pytest.mark.parametrize(
    ("choice", "wanted"), [("always", True), ("never", False), ("auto", False)]
)
def test_colour_is_for_terminals_unless_asked_for(choice, wanted):
    """Escape codes in a file are noise."""
    assert wants_colour(choice, io.StringIO()) is wanted


def test_row_ignores_what_the_last_life_of_a_process_said():
    """A restarted drafter must not look ready because the dead one was."""

    child = SimpleNamespace(
        spec=SimpleNamespace(name="drafter.1", role="drafter"),
        id=SimpleNamespace(pid=8),
        state="starting",
        started_s=0.0,
        n_restarts=1,
        last_error="SIGKILL",
        is_alive=True,
    )
    old = {"workers": [{"name": "drafter.1", "pid": 7, "state": "ready"}]}
    new = {"workers": [{"name": "drafter.1", "pid": 8, "state": "ready"}]}
    assert join([child], old, 1.0)[0].state == "starting"
    assert join([child], new, 1.0)[0].state == "ready"


def test_runs_go_there_and_back_again():
    """A machine that slows down must slow all arms alike."""
    assert interleave(["a", "b", "c"]) == ["a", "b", "c", "c", "b", "a"]


def bench_run(arm, file, speed, ids=(1, 2, 3), **stats):
    return Run(arm, file, tuple(ids), speed, 0.1, 2, stats)


def test_arm_is_the_median_over_files_of_the_mean_of_its_runs():
    """One slow file, or one slow run, must not decide."""
    speeds = {"a": (9, 11), "b": (20, 20), "c": (90, 90)}
    runs = [bench_run("plain", file, speed) for file in speeds for speed in speeds[file]]
    (plain,) = summarize(runs, reference="plain")
    assert plain.tokens_per_s == 20.0
    assert plain.n_same == 3


def test_text_that_differs_from_the_reference_is_counted():
    """Speed with another text is no speed."""
    runs = [
        bench_run("plain", "a", 10.0),
        bench_run("adaptive", "a", 20.0, ids=(1, 2, 4), drafted_rounds=1, acceptance_length=3.0),
    ]
    plain, adaptive = summarize(runs, reference="plain")
    assert (plain.n_same, adaptive.n_same) == (1, 0)
    assert adaptive.acceptance_length == 3.0
    assert "median 2.00x, least 2.00x (a)" in verdict([plain, adaptive])
    assert speed_table([plain, adaptive], 1).row_count == 2


def test_ps_shows_how_a_target_builds_its_forwards():
    """A mode that nobody can see running."""
    notes = {"build": "pipelined/4 deferred", "prebuild": "on"}
    rows = [row(state="ready", notes=notes), row("drafter.1", "ready")]
    table = ps_table({"processes": [one.as_json() for one in rows]})
    built = next(column for column in table.columns if column.header == "BUILD")
    assert list(built.cells) == ["pipelined/4 deferred ahead", "-"]


@pytest.mark.parametrize(
    ("source", "has_drafter", "mode"),
    [
        ("drafter", True, "serving, drafting"),
        ("drafter", False, "serving, plain decode"),
        ("mtp", False, "serving, drafting"),
        ("none", True, "serving, plain decode"),
    ],
)
def test_drafting_is_said_only_where_the_target_is_armed(source, has_drafter, mode):
    """A drafter that is up, and a target that will never ask it."""
    rows = [row(state="ready", notes={"source": source})]
    assert serving_mode([*rows, *[row("drafter.1", "ready")] * has_drafter]) == mode


def test_ps_says_why_nobody_drafts():
    """A state that cannot be rolled back, known to the log alone."""
    notes = {"drafting off": "state '0.keys' cannot be rolled back"}
    table = ps_table({"processes": [row(state="ready", notes=notes).as_json()]})
    assert list(table.columns[-1].cells) == ["drafting off: state '0.keys' cannot be rolled back"]


def test_histogram_reads_as_rounds_by_rows():
    """Both forms that a reply may use."""
    assert histogram({"1": 3, "5": 10, "8": 0}) == "1:3 5:10"
    assert histogram([0, 3, 0]) == "1:3"
