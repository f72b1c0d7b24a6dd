"""The run folder: private, claimed once, cleared."""

import json
import os
import subprocess
import sys
from dataclasses import asdict

import psutil
import pytest

from common.errors import AddressInUse, ConfigError
from common.launcher.rundir import PIDS_FILE, ProcessId, claim, read_pids, running_launcher


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_claimed_folder_is_private(tmp_path):
    """Whoever can open the folder can talk to the sockets in it."""
    run = claim(tmp_path / "a" / "run")
    assert (tmp_path / "a" / "run").stat().st_mode & 0o777 == 0o700
    run.release()


def test_second_claim_is_refused_and_names_the_way_out(tmp_path):
    """Two launchers on one folder would fight over its sockets."""
    run = claim(tmp_path / "run")
    with pytest.raises(AddressInUse, match="--name"):
        claim(tmp_path / "run")
    run.release()


def test_release_removes_the_folder(tmp_path):
    """`down` leaves no socket and no file."""
    run = claim(tmp_path / "dflash-up-7" / "run")
    run.write_pids({"launcher": ProcessId.of(os.getpid())})
    (run.logs / "x.log").write_text("x")
    run.release()
    assert not (tmp_path / "dflash-up-7").exists()


def test_release_leaves_a_folder_that_the_user_made(tmp_path):
    """`run.run_dir = "/srv/x/run"` is no leave to remove /srv/x."""
    (tmp_path / "mine").mkdir()
    claim(tmp_path / "mine" / "run").release()
    assert list((tmp_path / "mine").iterdir()) == []


def test_logs_survive_a_failed_run_until_the_next_claim(tmp_path):
    """After a failed start `dflash-up logs` must still show why."""
    run = claim(tmp_path / "run")
    (run.logs / "target.1.log").write_text("why")
    run.release(keep_logs=True)
    assert (tmp_path / "run" / "logs" / "target.1.log").read_text() == "why"
    claim(tmp_path / "run").release()


def test_leftovers_of_a_dead_launcher_are_ended_and_cleared(tmp_path, sleeper):
    """After `kill -9` of a launcher the next start must not find its folder taken."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    entries = {
        "launcher": {"pid": 2**22 - 7, "created_s": 1.0},
        "target.1": asdict(ProcessId.of(sleeper.pid)),
    }
    (folder / PIDS_FILE).write_text(json.dumps(entries))
    (folder / "control.sock").write_text("")
    run = claim(folder)
    assert not psutil.pid_exists(sleeper.pid)
    assert not (folder / "control.sock").exists()
    run.release()


def test_a_reused_process_id_is_not_hit(tmp_path, sleeper):
    """The number may belong to somebody else by now; its start time tells."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    stale = {"pid": sleeper.pid, "created_s": ProcessId.of(sleeper.pid).created_s - 100}
    (folder / PIDS_FILE).write_text(json.dumps({"target.1": stale, "launcher": stale}))
    assert running_launcher(folder) is None
    claim(folder).release()
    assert sleeper.poll() is None


def test_damaged_pid_file_counts_as_empty(tmp_path):
    """A full disk must not keep the next run from starting."""
    (tmp_path / PIDS_FILE).write_text("{half")
    assert read_pids(tmp_path) == {}


def test_path_too_long_for_a_socket_is_refused_in_words(tmp_path):
    """Else the bind fails with a bare errno."""
    with pytest.raises(ConfigError, match="shorter"):
        claim(tmp_path / ("x" * 90))
