"""Every family takes back any number of drafts, exactly; a new family is a line in `CASES`.

Bit-equal between two wrong tails, and close to one-row steps: design's definition of exact.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
from support.target_cases import CLOSE, arrays_of, feed, fork
from support.tiny import EOS_ID, make_tiny_target
from support.tiny_glm5_next import make_tiny_glm5_next
from support.tiny_llama import make_tiny_llama
from support.tiny_qwen3 import make_tiny_qwen3
from support.tiny_qwen3_5 import make_tiny_qwen3_5

from target_svc.load import FAMILIES
from target_svc.models.family import run_rows
from target_svc.rollback import commit

ROWS = 16  # an anchor and 15 drafts
#: Contexts around multiples of 4 and 16.
BASES = (3, 4, 5, 15, 16, 17)
LENGTH = 150
FOLLOWING = 3  # rows that are scored after a roll back
START = 3  # where twenty rounds begin
#: Drafts accepted in each of twenty rounds: none and all, few as text has them, all again.
COUNTS = (0, 15, *np.random.default_rng(5).integers(0, 3, 17).tolist(), 15)
END = START + sum(COUNTS) + len(COUNTS)


@dataclass(frozen=True)
class Case:
    """One family: how a tiny checkpoint of it is made, and where its state matters."""

    make: object
    fields: dict = field(default_factory=dict)
    bases: tuple = BASES
    fault_base: int = 33  # where every piece of state decides what is scored next


CASES = {
    # The indexers of these two drop blocks from 20 and pools from 64 tokens on.
    "qwen4_exp": Case(
        make_tiny_target,
        {"num_hidden_layers": 4, "dtype": "F32"},
        bases=(3, 15, 19, 31, 32, 33),
        fault_base=37,
    ),
    "glm5_next": Case(make_tiny_glm5_next, bases=(3, 15, 16, 63, 64, 65), fault_base=75),
    "qwen3": Case(make_tiny_qwen3),
    "llama": Case(make_tiny_llama),
    "qwen3_5": Case(make_tiny_qwen3_5),
    "qwen3_5_moe": Case(make_tiny_qwen3_5, {"case": "qwen3_5_moe"}),
}


class Family:
    """A model, one text, its scores of one-row steps, and states on the way through it."""

    def __init__(self, name, folder):
        case = CASES[name]
        self.case = case
        self.model = FAMILIES[name](case.make(folder, **case.fields))
        self.text = np.random.default_rng(11).integers(8, 300, LENGTH)
        self.text[[10, 33, 34, 70]] = EOS_ID
        self.states, rows, state = {}, [], self.model.new_state()
        most = max(*case.bases, case.fault_base) + ROWS + FOLLOWING + 16
        for at in range(max(most, END + FOLLOWING)):
            if at in (*case.bases, case.fault_base):
                self.states[at] = fork(state)
            rows.append(feed(self.model, state, self.text[at : at + 1])[0])
        self.one_by_one = np.stack(rows)

    def verify(self, base, keep, tail, *, following=FOLLOWING, plant=None):
        """Verify `keep` right rows and a wrong tail; check scores, return all numbers after it."""
        state = fork(self.states[base])
        if plant is not None:
            plant(state)
        ids = [*self.text[base : base + keep].tolist(), *tail]
        logits = np.array(self.model.logits(run_rows(self.model, ids, state)))
        commit(state, keep)
        numbers = arrays_of(state) if plant is None else {}
        end = base + keep
        numbers["next"] = feed(self.model, state, self.text[end : end + following])
        assert state.base == end + following
        assert np.abs(logits[:keep] - self.one_by_one[base:end]).max() < CLOSE
        assert np.abs(numbers["next"] - self.one_by_one[end : end + following]).max() < CLOSE
        return numbers


@pytest.fixture(scope="module", params=CASES)
def family(request, tmp_path_factory):
    """See `Family`."""
    return Family(request.param, tmp_path_factory.mktemp(request.param))


def wrong_tails(seed, rows):
    """Two tails, with the end of a text first and last, and between."""
    tails = np.random.default_rng(seed).integers(8, 300, (2, rows))
    tails[0, :2] = EOS_ID
    tails[1, rows // 2 :: 5] = tails[1, -1:] = EOS_ID
    return tails.tolist()


@pytest.mark.parametrize("n_accepted", range(ROWS))
def test_any_number_of_accepted_drafts_is_exact(family, n_accepted):
    """A rejected row that leaks into state or scores, through any piece, at any block edge."""
    keep = n_accepted + 1
    for base in family.case.bases:
        tails = wrong_tails(100 * base + keep, ROWS - keep)
        one, two = (family.verify(base, keep, tail) for tail in tails)
        assert one.keys() == two.keys()
        for name, value in one.items():
            assert np.array_equal(value, two[name]), (base, name)


def test_twenty_rounds_in_a_row_are_exact(family):
    """A drift, or a trace of rejected rows, that a single round is too short to show."""
    one, two = fork(family.states[START]), fork(family.states[START])
    for round_, n_accepted in enumerate(COUNTS):
        keep, at = n_accepted + 1, one.base
        tails = wrong_tails(round_, ROWS - keep)
        kept = [
            _round(family, state, keep, tail) for state, tail in zip((one, two), tails, strict=True)
        ]
        assert np.array_equal(*kept), round_
        assert np.abs(kept[0] - family.one_by_one[at : at + keep]).max() < CLOSE, round_
    assert (len(COUNTS), one.base, two.base) == (20, END, END)
    numbers, others = arrays_of(one), arrays_of(two)
    for name, value in numbers.items():
        assert np.array_equal(value, others[name]), name
    following = feed(family.model, one, family.text[END : END + FOLLOWING])
    assert np.abs(following - family.one_by_one[END : END + FOLLOWING]).max() < CLOSE


def _round(family, state, keep, tail):
    """Verify and commit `keep` right rows before a wrong tail; scores [keep, V]."""
    ids = [*family.text[state.base : state.base + keep].tolist(), *tail]
    logits = np.array(family.model.logits(run_rows(family.model, ids, state)))
    commit(state, keep)
    return logits[:keep]


def test_a_piece_that_is_not_rolled_back_is_noticed(family):
    """The checks above must be able to fail, for every piece of state that a family has."""
    base = family.case.fault_base
    tail = np.random.default_rng(1).integers(100, 300, ROWS - 2).tolist()
    family.verify(base, 2, tail, following=16)
    unnoticed = []
    for name in family.states[base].pieces:
        try:
            family.verify(base, 2, tail, following=16, plant=lambda s, name=name: _skip(s, name))
        except (AssertionError, ValueError):  # a buffer that is too long does not fit the mask
            continue
        unnoticed.append(name)
    assert unnoticed == []


def _skip(state, name):
    """Let one piece keep all rows whatever it is told."""
    piece = state.pieces[name]
    real = piece.roll_back
    piece.roll_back = lambda _keep: real(ROWS)
