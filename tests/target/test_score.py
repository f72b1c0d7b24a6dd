"""`python -m target_svc score`: the reference's scores however rows are fed, and clear refusals."""

import logging

import numpy as np
import pytest
from click.testing import CliRunner
from support.target_cases import CLOSE
from support.tiny import VOCAB

from target_svc.__main__ import main


@pytest.fixture(autouse=True)
def _as_before():
    """Leave the root logger as it was: the command sets it up."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.fixture
def score(tmp_path, folders):
    """Run the command on ids; its result and the file of scores."""

    def run(ids, *flags, case="main"):
        np.save(tmp_path / "ids.npy", ids)
        return run_on(tmp_path / "ids.npy", *flags, case=case)

    def run_on(path, *flags, case="main", out=None):
        out = out or tmp_path / "out.npy"
        line = [str(folders[case]), str(path), str(out), "--device", "cpu", *flags]
        return CliRunner().invoke(main, ["score", *line]), out

    run.on = run_on
    return run


def reference_nats(logits, ids):
    """Mean -log p of each token but the first."""
    wide = logits.astype(np.float64)
    log_p = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return -np.mean([log_p[i, ids[i + 1]] for i in range(len(ids) - 1)])


@pytest.mark.parametrize("case", ["main", "tied"])
@pytest.mark.parametrize("feed", ["all", "one", "7", "500"])
def test_scores_are_the_reference_s_however_they_are_fed(score, golden, case, feed):
    """A chunk's scores written one row late, or nats of the token that was read."""
    ids, wanted = golden[f"{case}.ids"], golden[f"{case}.logits"]
    result, out = score(ids, "--feed", feed, case=case)
    assert result.exit_code == 0, result.output
    found = np.load(out)
    assert found.dtype == np.float32
    assert found.shape == (len(ids), VOCAB)
    assert np.abs(found - wanted).max() < CLOSE
    said = float(result.output.split(" nats")[0].split()[-1])
    assert abs(said - reference_nats(wanted, ids)) < CLOSE


def test_three_ways_to_feed_agree_with_each_other(score, golden):
    """A state that depends on how rows were grouped."""
    found = []
    for feed in ("all", "one", "16"):
        _, out = score(golden["main.ids"], "--feed", feed)
        found.append(np.load(out))
    assert np.abs(found[0] - found[1]).max() < CLOSE
    assert np.abs(found[0] - found[2]).max() < CLOSE


def test_scores_leave_the_device_in_pieces(score, golden, monkeypatch):
    """A piece written over the one before it."""
    monkeypatch.setattr("target_svc.score._ROWS_OUT", 5)
    _, out = score(golden["main.ids"])
    assert np.abs(np.load(out) - golden["main.logits"]).max() < CLOSE


def test_one_token_has_scores_but_no_nats(score):
    """A division by zero tokens."""
    result, out = score(np.array([9]))
    assert result.exit_code == 0
    assert "need two" in result.output
    assert np.load(out).shape == (1, VOCAB)


@pytest.mark.parametrize(
    ("ids", "flags", "words"),
    [
        (np.array([1.0, 2.0]), (), "holds float64 [2]"),
        (np.array([[1, 2]]), (), "holds int64 [1, 2]"),
        (np.array([], np.int64), (), "N at least 1"),
        (np.array([1, VOCAB]), (), f"token id {VOCAB} at index 1"),
        (np.array([1, -1]), (), "token id -1 at index 1"),
        (np.full(4097, 9), (), "context of this target is 4096"),
        (np.array([1, 2]), ("--feed", "0"), "--feed '0'"),
        (np.array([1, 2]), ("--feed", "some"), "--feed 'some'"),
    ],
)
def test_ids_that_cannot_be_scored_are_refused_in_a_sentence(score, ids, flags, words):
    """A traceback, or scores of wrapped ids."""
    result, out = score(ids, *flags)
    assert result.exit_code == 2
    assert words in result.output
    assert not out.exists()


def test_files_that_cannot_be_used_are_named(score, tmp_path):
    """A FileNotFoundError, pickled objects read, or half a file left behind."""
    text = tmp_path / "text.npy"
    text.write_text("1 2 3")
    folder = tmp_path / "folder"
    folder.mkdir()
    ids = tmp_path / "few.npy"
    np.save(ids, np.array([1, 2]))
    for path, out, words in (
        (tmp_path / "none.npy", None, "none.npy"),
        (text, None, "not a .npy file"),
        (ids, tmp_path / "no" / "folder" / "out.npy", "cannot write"),
        (ids, folder, "cannot write"),
    ):
        result, _ = score.on(path, out=out)
        assert result.exit_code == 2
        assert words in result.output
    assert list(tmp_path.rglob("*.part")) == []
