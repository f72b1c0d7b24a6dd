"""What a child's log says about its end, in every form a log has."""

import pytest

from common.errors import AddressInUse, DFlashError, KeyFault, ModelMismatch, NotReady
from common.launcher.plan import ProcessSpec
from common.launcher.processes import Child, describe_exit, error_of, last_error_line

TRACE = """\
12:00:00.000 x.1 | info hello
12:00:01.000 x.1 | error ended by a fault
Traceback (most recent call last):
  File "x.py", line 1
TypeError: no such thing
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TRACE, "ended by a fault: TypeError: no such thing"),
        (
            "12:00:00.000 x.1 | error fc_hash differs\n12:00:00.001 x.1 | info bye\n",
            "fc_hash differs",
        ),
        ('{"name": "x.1", "level": "error", "message": "no memory"}\n', "no memory"),
        ("12:00:00.000 x.1 | info ending: stopped\n", "info ending: stopped"),
        ("Killed\n", "Killed"),
        ("", ""),
    ],
)
def test_last_error_of_a_log_is_one_sentence(tmp_path, text, said):
    """The operator reads this line, not the file."""
    (tmp_path / "x.log").write_text(text)
    assert last_error_line(tmp_path / "x.log") == said


def test_refusal_that_only_the_coordinator_logged_is_found(tmp_path):
    """A worker that is turned away while loading may not know why."""
    (tmp_path / "coordinator.log").write_text(
        "12:00:00.000 coordinator | warning x.1 refused: fc_hash differs: a has 1, b has 2\n"
    )
    child = Child(ProcessSpec("x.1", "drafter", (), {}, 1.0, None, 0.1), tmp_path)
    assert child.error_line() == "fc_hash differs: a has 1, b has 2"


@pytest.mark.parametrize(
    ("status", "kind"),
    [(3, NotReady), (4, AddressInUse), (5, ModelMismatch), (6, KeyFault), (1, DFlashError)],
)
def test_exit_code_of_a_child_is_the_exit_code_of_the_run(status, kind):
    """Scripts tell a mismatch from a crash by the number."""
    error = error_of(status, "x")
    assert type(error) is kind
    assert error.exit_code == status


def test_signals_have_names():
    """ "exit -9" sends people to a manual."""
    assert [describe_exit(status) for status in (5, -9)] == ["exit 5", "SIGKILL"]
