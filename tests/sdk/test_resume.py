"""A stream whose connection breaks goes on where it was: sync and async, over a real socket."""

import asyncio
import threading
import time

import pytest
from support.cutter import Cutter
from support.scripted_coordinator import ScriptedCoordinator, reply

from common.errors import BadRequest, Cancelled, PeerLost, UnknownClaim
from common.net.auth import new_keys
from common.sdk import AsyncClient, Client, TokenEvent
from common.sdk.claim import TELL_AFTER, WINDOW, Claim
from common.wire.messages import Done, Failed, Read, Sampling, Submit, Tokens
from common.wire.tensors import from_text

IDS = tuple(range(100, 130))


def stop_after(n_first, *, gate=None, later=IDS):
    """Answers: the first Submit gets `n_first` ids and no end, each later one the rest."""

    def answer(submit):
        head, *_ = reply(submit, IDS)
        if not submit.from_index:
            tokens = [Tokens(submit.request, i, (IDS[i],), ("x",), 0) for i in range(n_first)]
            return [head, *tokens, gate or threading.Event()]
        index = submit.from_index
        rest = [Tokens(submit.request, i, (later[i],), ("x",), 0) for i in range(index, len(later))]
        return [head, *rest, Done(submit.request, "length", "", "{}", len(later))]

    return answer


class Sync:
    """The plain client."""

    @staticmethod
    def run(address, after, act, **options):
        """Stream; `act` once `after` ids came. Returns (ids, how often it was taken up again)."""
        with Client(endpoint=address) as client, client.stream("x", **options) as stream:
            ids = []
            for event in stream:
                if isinstance(event, TokenEvent):
                    assert event.index == len(ids)
                    ids += event.ids
                    if len(ids) == after:
                        act(stream)
            assert stream.completion.token_ids == tuple(ids)
            return ids, stream.n_resumed


class Async:
    """The client for asyncio."""

    @staticmethod
    def run(address, after, act, **options):
        async def main():
            async with (
                AsyncClient(endpoint=address) as client,
                client.stream("x", **options) as stream,
            ):
                ids = []
                async for event in stream:
                    if isinstance(event, TokenEvent):
                        assert event.index == len(ids)
                        ids += event.ids
                        if len(ids) == after:
                            act(stream)
                assert stream.completion.token_ids == tuple(ids)
                return ids, stream.n_resumed

        return asyncio.run(main())


@pytest.fixture(params=[Sync, Async], ids=["sync", "async"])
def kind(request):
    return request.param


@pytest.fixture
def line(tmp_path):
    """A coordinator's address, and a cutter in front of it."""
    with Cutter(tmp_path / "near.sock", tmp_path / "far.sock") as cutter:
        yield f"ipc://{tmp_path}/far.sock", cutter


def test_stream_goes_on_at_its_index_on_another_connection(line, kind):
    """Indices are contiguous and nothing comes twice, though the same request was asked again."""
    address, cutter = line
    gate = threading.Event()
    with ScriptedCoordinator(address, stop_after(7, gate=gate)) as coordinator:
        ids, n_resumed = kind.run(cutter.address, 7, lambda _: cutter.cut(), timeout_s=20)
        gate.set()
    first, second = coordinator.submits
    assert (tuple(ids), n_resumed, cutter.n_cut) == (IDS, 1, 1)
    assert (first.from_index, second.from_index) == (0, 7)
    assert first.claim == second.claim != ""
    assert 0 < second.deadline_ms <= first.deadline_ms == 20_000
    assert second.sampling == first.sampling  # the drawn seed too


def test_stream_goes_on_over_tcp_with_the_same_key(tmp_path, kind, monkeypatch):
    """The line that really breaks is the one between two machines."""
    keys = tmp_path / "keys"
    server = new_keys(keys, "coordinator", "coordinator")
    new_keys(keys, "client", "client")
    monkeypatch.setenv("DFLASH_KEYS_DIR", str(keys))
    monkeypatch.setenv("DFLASH_RUN_RUN_DIR", str(tmp_path))
    gate = threading.Event()
    coordinator = ScriptedCoordinator("tcp://127.0.0.1:*", stop_after(7, gate=gate), keys=server)
    with coordinator:
        port = int(coordinator.address.rpartition(":")[2])
        with Cutter(None, port) as cutter:
            ids, n_resumed = kind.run(cutter.address, 7, lambda _: cutter.cut())
            n_cut = cutter.n_cut
        gate.set()
    assert (tuple(ids), n_resumed, n_cut) == (IDS, 1, 1)
    assert [submit.from_index for submit in coordinator.submits] == [0, 7]


def test_an_outage_shorter_than_the_limit_is_sat_out(line, kind):
    """The connection comes back after a while, not at once."""
    address, cutter = line
    gate, silent = threading.Event(), threading.Event()

    def outage(_):
        cutter.path.rename(cutter.path.with_suffix(".away"))  # a listener nobody can find ..
        cutter.cut()
        threading.Timer(0.3, back).start()

    def back():
        cutter.path.with_suffix(".away").rename(cutter.path)
        silent.set()

    with ScriptedCoordinator(address, stop_after(7, gate=gate)) as coordinator:
        asked = []
        address_class = "common.sdk.locate.Address.may_answer"
        with pytest.MonkeyPatch.context() as patch:  # .. as a network that is away, not a system
            patch.setattr(address_class, lambda self: asked.append(1) or True)
            ids, n_resumed = kind.run(cutter.address, 7, outage)
        gate.set()
    assert silent.is_set()
    assert asked
    assert tuple(ids) == IDS
    assert n_resumed >= 1
    assert coordinator.submits[-1].from_index == 7


def test_outage_over_the_limit_is_the_loss_itself(line, kind, monkeypatch):
    """Nothing hangs: after `resume_s` the caller gets the error it would have got at once."""
    address, cutter = line
    monkeypatch.setattr("common.sdk.locate.Address.may_answer", lambda self: True)
    gate = threading.Event()
    with ScriptedCoordinator(address, stop_after(7, gate=gate)):
        begun = time.monotonic()
        with pytest.raises(PeerLost):
            kind.run(cutter.address, 7, lambda _: cutter.shut(), resume_s=0.3)
        gate.set()
    assert 0.3 <= time.monotonic() - begun < 3.0


def test_system_that_is_gone_from_this_machine_is_not_waited_for(line, kind):
    """Nobody listens on the socket any more: there is nothing to come back to."""
    address, cutter = line
    gate = threading.Event()
    with ScriptedCoordinator(address, stop_after(7, gate=gate)):
        begun = time.monotonic()
        with pytest.raises(PeerLost):
            kind.run(cutter.address, 7, lambda _: cutter.shut(), resume_s=30)
        gate.set()
    assert time.monotonic() - begun < 3.0


def test_without_resume_no_claim_is_shown_and_a_loss_is_an_error(line, kind):
    """What is not to be taken up must not run on either."""
    address, cutter = line
    gate = threading.Event()
    with ScriptedCoordinator(address, stop_after(7, gate=gate)) as coordinator:
        with pytest.raises(PeerLost):
            kind.run(cutter.address, 7, lambda _: cutter.cut(), resume_s=0)
        gate.set()
    assert [submit.claim for submit in coordinator.submits] == [""]


def test_claim_that_is_forgotten_is_a_typed_error(line, kind):
    """The tokens so far came from a run that nobody remembers."""
    address, cutter = line
    gate = threading.Event()

    def answer(submit):
        if submit.from_index:
            return [Failed(submit.request, "unknown_claim", "claim 'x': no request")]
        return stop_after(7, gate=gate)(submit)

    with ScriptedCoordinator(address, answer):
        with pytest.raises(UnknownClaim):
            kind.run(cutter.address, 7, lambda _: cutter.cut())
        gate.set()


def test_cancel_while_there_is_no_connection_ends_the_stream(line, kind, monkeypatch):
    """Ctrl-C in the middle of an outage."""
    address, cutter = line
    monkeypatch.setattr("common.sdk.locate.Address.may_answer", lambda self: True)
    gate = threading.Event()

    def act(stream):
        cutter.shut()
        stream.cancel()

    with ScriptedCoordinator(address, stop_after(7, gate=gate)):
        begun = time.monotonic()
        with pytest.raises(Cancelled):
            kind.run(cutter.address, 7, act, resume_s=30)
        gate.set()
    assert time.monotonic() - begun < 5.0


def test_reader_tells_how_far_it_is(line, kind):
    """Else its window fills and the request pauses."""
    address, _ = line
    n_tokens = 3 * WINDOW

    def answer(submit):
        groups = [tuple(range(8))] * (n_tokens // 8)
        return reply(submit, *groups)

    with ScriptedCoordinator(address, answer) as coordinator:
        ids, _ = kind.run(address, 8, lambda _: None)
    assert (len(ids), coordinator.submits[0].window) == (n_tokens, WINDOW)
    assert coordinator.reads == sorted(coordinator.reads)
    steps = [b - a for a, b in zip([0, *coordinator.reads], coordinator.reads, strict=False)]
    assert all(TELL_AFTER <= step <= TELL_AFTER + 8 for step in steps)
    assert coordinator.reads[-1] > n_tokens - WINDOW // 2


def test_connection_of_a_stream_that_was_left_is_used_again(line):
    """A cancel that was answered leaves a clean connection."""
    address, _ = line
    gate = threading.Event()
    with ScriptedCoordinator(address, stop_after(7, gate=gate)) as coordinator:
        with Client(endpoint=address) as client:
            for _ in range(3):
                for event in client.stream("x"):
                    if isinstance(event, TokenEvent):
                        break
        gate.set()
    assert len(coordinator.cancelled) == 3
    assert len(coordinator.hellos) == 1


def test_idle_connection_that_broke_costs_no_error(line):
    """A client that was idle over a restart of the network asks on a new connection."""
    address, cutter = line
    with (
        ScriptedCoordinator(address, lambda submit: reply(submit, (1,))) as coordinator,
        Client(endpoint=cutter.address) as client,
    ):
        client.generate("x")
        cutter.cut()
        assert client.generate("x").token_ids == (1,)
    assert len(coordinator.hellos) == 2


@pytest.mark.parametrize("value", [-1, 3600, float("nan")])
def test_resume_time_out_of_range_is_refused(line, value):
    """A wait has an end."""
    address, _ = line
    with Client(endpoint=address) as client, pytest.raises(BadRequest, match="resume_s"):
        client.generate("x", resume_s=value)


# --------------------------------------------------------------------------- the pure part


def claim(resume_s=10.0, timeout_s=None):
    return Claim(Submit("r", from_text("x"), Sampling(), deadline_ms=1), resume_s, timeout_s, 100.0)


def test_tries_slow_down_and_end():
    """A coordinator that restarts must not be stormed, nor waited for without end."""
    held = claim()
    assert held.left_s(101.0) == 10.0
    pauses = [held.pause_s(101.0) for _ in range(8)]
    assert pauses == [0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert held.pause_s(110.7) == pytest.approx(0.3)
    assert held.left_s(111.0) == 0.0
    held.heard()
    assert held.left_s(200.0) == 10.0


def test_deadline_of_the_request_ends_the_tries_and_is_told_again():
    """The whole request has one deadline, however often it is taken up."""
    held = claim(timeout_s=5.0)
    assert held.left_s(103.0) == 2.0
    submit = held.again(9, 103.0)
    assert (submit.from_index, submit.deadline_ms) == (9, 2000)
    assert submit.claim == held.submit.claim


def test_two_requests_have_two_claims():
    """Who guesses a claim must have guessed 128 bits."""
    words = {claim().submit.claim for _ in range(100)}
    assert len(words) == 100
    assert {len(word) for word in words} == {32}


def test_reads_are_told_in_steps_and_from_a_resume_on():
    """A message per token would cost more than it saves."""
    held = claim()
    assert held.read(TELL_AFTER - 1) is None
    assert held.read(TELL_AFTER) == Read("r", TELL_AFTER)
    assert held.read(TELL_AFTER + 1) is None
    held.again(500, 101.0)
    assert held.read(500 + TELL_AFTER - 1) is None
    assert held.read(500 + TELL_AFTER) == Read("r", 500 + TELL_AFTER)
