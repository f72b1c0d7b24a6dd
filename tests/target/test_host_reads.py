"""A session's answers say what of the n-gram table it wanted, and nobody else's."""

import pytest
from support.target_actor import Actor

from common.errors import EngineError
from common.wire.messages import Prefilled
from target_svc.host_reads import HostReads, NgramReads
from target_svc.load import EngineOptions, load_engine
from target_svc.models.blocks import ngram_table
from target_svc.models.family import host_counters

PROMPT = list(range(20, 41))


@pytest.fixture
def engine(folders, monkeypatch):
    """Chunks of eight rows; the tiny table is taken for one that is larger than memory."""
    monkeypatch.setattr(ngram_table, "SMALL_BYTES", 0)
    return load_engine(folders["main"], None, EngineOptions(prefill_chunk=8, prebuilds=False))


def reads_of(answer):
    return answer.ngram_hits, answer.ngram_misses


def opened(engine):
    actor = Actor(engine)
    actor.open(PROMPT, taps=False)
    return actor


def test_each_answer_tells_its_own_reads_and_together_they_are_all(engine):
    """Totals of the process passed off as a request's, or the reads of a chunk left out."""
    heads, before = engine.model.args.ngram.heads, host_counters(engine.model)
    first = opened(engine)
    rounds = [first.round(()), first.round(()), first.round(())]
    assert sum(reads_of(first.of(Prefilled)[0])) == heads * len(PROMPT)
    assert [sum(reads_of(verdict)) for verdict in rounds] == [heads] * 3
    told = [reads_of(answer) for answer in (*first.of(Prefilled), *rounds)]
    total = {name: count - before[name] for name, count in host_counters(engine.model).items()}
    assert sum(hits for hits, _ in told) == total["ngram_hits"]
    assert sum(misses for _, misses in told) == total["ngram_misses"] > 0


def test_what_was_read_lately_is_a_hit_of_whoever_wants_it_again(engine):
    """A cache that is counted but never hit."""
    heads = engine.model.args.ngram.heads
    opened(engine)
    again = opened(engine)
    assert reads_of(again.of(Prefilled)[0]) == (heads * len(PROMPT), 0)


def test_rows_of_drafts_count_whether_they_are_accepted_or_not(folders, drafter):
    """A hit rate of accepted tokens alone says nothing of the reads that a round waits for."""
    engine = load_engine(folders["main"], drafter, EngineOptions(prebuilds=False))
    heads = engine.model.args.ngram.heads
    actor = Actor(engine)
    actor.open(PROMPT)
    verdict = actor.round([9, 9, 9])
    assert verdict.n_accepted < 3
    assert sum(reads_of(verdict)) == 4 * heads


def test_reads_of_another_session_are_left_out(engine):
    """Two requests that take turns, each shown the sum."""
    one, other = HostReads(engine.model), HostReads(engine.model)
    with one.counted():
        engine.model.fill(engine.model.blank(3), [9, 10, 11], engine.model.new_state())
    with other.counted():
        engine.model.fill(engine.model.blank(1), [300], engine.model.new_state())
    heads = engine.model.args.ngram.heads
    taken = one.take(), other.take(), one.take()
    assert [reads.hits + reads.misses for reads in taken] == [3 * heads, heads, 0]


def test_reads_before_an_error_count(engine):
    """A round that fails after its rows were read, and is run again."""
    reads = HostReads(engine.model)
    with pytest.raises(EngineError, match="planted"):
        _read_and_fail(engine.model, reads)
    assert reads.take() != NgramReads()


def _read_and_fail(model, reads):
    with reads.counted():
        model.fill(model.blank(1), [300], model.new_state())
        raise EngineError("planted")


def test_a_family_without_a_table_tells_of_none():
    """A key that is missing where a family reads nothing of the host."""
    reads = HostReads(object())
    with reads.counted():
        pass
    assert reads.take() == NgramReads(0, 0)
