"""Host rows are asked for a step before they are needed, and never at the price of an error."""

from collections import Counter, deque
from types import SimpleNamespace

import numpy as np
import pytest

from common.wire.messages import Block, RoundKey, Sampling
from target_svc.load import EngineOptions, load_engine
from target_svc.models.blocks.ngram_table import NgramTable
from target_svc.models.family import host_counters, read_ahead
from target_svc.rounds import Rounds
from target_svc.service import TargetService

IDS = [int(token) for token in np.random.default_rng(4).integers(8, 490, 21)]
CHUNK = 8


@pytest.fixture(scope="module")
def engine(folders):
    """A tiny engine with chunks of eight rows."""
    return load_engine(folders["main"], None, EngineOptions(prefill_chunk=CHUNK, prebuilds=False))


@pytest.fixture
def table_calls(monkeypatch):
    """What a table is asked: ("ahead" or "now", row ids)."""
    calls = []
    real = NgramTable.gather_into

    def gather_into(self, rows, out):
        calls.append(("now", rows.tolist()))
        real(self, rows, out)

    monkeypatch.setattr(NgramTable, "gather_into", gather_into)
    monkeypatch.setattr(
        NgramTable, "prefetch", lambda _, rows: calls.append(("ahead", rows.tolist()))
    )
    return calls


def prefilled(engine):
    """A session after its prompt."""
    session = engine.open(Sampling(), taps=False)
    for _ in session.prefill(IDS):
        pass
    return session


def test_prefill_asks_for_each_chunk_while_the_one_before_it_runs(engine, table_calls):
    """Rows of the chunk that runs asked for, or of a look-back that is one token off."""
    prefilled(engine)
    kinds = [kind for kind, _ in table_calls]
    assert kinds == ["ahead", "now", "ahead", "now", "now"]
    assert table_calls[0][1] == table_calls[3][1]
    assert table_calls[2][1] == table_calls[4][1]


@pytest.mark.parametrize("drafts", [[], [11], [11, 7, 12, 300]])
def test_drafts_are_asked_for_as_their_verify_will_read_them(engine, table_calls, drafts):
    """A look-back without the anchor: every row asked for is the wrong one."""
    session = prefilled(engine)
    table_calls.clear()
    session.prefetch(drafts)
    session.verify(drafts, len(drafts) + 1)
    assert [kind for kind, _ in table_calls] == ["ahead", "now"]
    assert table_calls[0][1] == table_calls[1][1]


def test_drafts_outside_the_vocabulary_are_left_alone(engine, table_calls):
    """A hostile block that ends a session before anything is verified."""
    session = prefilled(engine)
    table_calls.clear()
    session.prefetch([11, 2**31 - 1])
    session.prefetch([-1])
    assert table_calls == []


def test_a_session_without_an_anchor_asks_for_nothing(engine, table_calls):
    """An anchor of -1 hashed into a row."""
    session = engine.open(Sampling(), taps=False)
    session.prefetch([11])
    session.close()
    session.prefetch([11])
    assert table_calls == []


def test_a_block_is_read_ahead_while_its_verify_is_awaited(engine):
    """Prefetch that nobody calls."""
    asked = []
    seat = SimpleNamespace(
        link=b"drafter",
        waiting=None,
        take_block=lambda block: True,
        session=SimpleNamespace(prefetch=asked.append),
    )
    rounds = Rounds(engine, lambda *_: True, None, deque(), Counter())
    block = Block(RoundKey("s", 1, 0, 21, 9, 1), (11, 12), (0.9, 0.9))
    rounds.block(b"drafter", seat, block, 0.0)
    rounds.block(b"another", seat, block, 0.0)
    assert asked == [(11, 12)]


def test_heartbeats_carry_the_table_s_counters(engine):
    """A cache that nobody can see working."""
    before = TargetService(engine, lambda *_: True, 1).heartbeat()[2]["ngram_misses"]
    prefilled(engine)
    after = TargetService(engine, lambda *_: True, 1).heartbeat()[2]
    heads = engine.model.args.ngram.heads
    assert after["ngram_misses"] - before == heads * len(IDS)
    assert {"ngram_hits", "ngram_prefetched", "ngram_bytes_read"} <= set(after)


def test_a_family_without_host_rows_has_none_to_read_ahead():
    """An attribute error in every other family."""
    other = SimpleNamespace()
    read_ahead(other, [1, 2], SimpleNamespace())
    assert host_counters(other) == {}
