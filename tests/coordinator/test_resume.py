"""Claims, resumed streams and slow readers, as clients see them on the in-process mesh."""

import random

import pytest
from support.scripted import RIGHT, plain_reply
from support.world import World

from common.coordinator.readers import MAX_ENDED
from common.net.inproc import Faults
from common.wire.messages import Bye, Cancel, Done, Failed, Hello, Read, Sampling, Submit
from common.wire.tensors import from_ids
from common.wire.version import MAJOR, MINOR

PROMPT = [3, 1, 4, 1, 5]
N = 200


def world_of(**config):
    world = World(**config)
    world.target()
    world.drafter(modes=(RIGHT, "wrong at 3"))
    client = world.client("first")
    world.settle()
    return world, client


def broken_off(world, client, *, seconds=0.2, n=N, **options):
    """A claimed request whose client's connection breaks after a while; what it had."""
    client.submit("a", PROMPT, n, claim="c-1", **options)
    world.settle(seconds)
    leave(world, client)
    return client.replies["a"]


def leave(world, client):
    """The client's process dies; its requests are no longer waited for."""
    world.mesh.kill(client.name)
    world.clients.pop(client.name)


def exposed(world):
    """Lines of the coordinator's metrics."""
    return set(world.hub.metrics.text().splitlines())


def n_opens(world):
    return sum(len(target.opens) for lives in world.targets.values() for target in lives)


def ended(world, client, request="a"):
    world.finish()
    return client.ends[request]


def test_stream_goes_on_at_its_index_after_the_connection_broke():
    """Nothing is run twice, lost or repeated; drafts were accepted and rejected on the way."""
    world, first = world_of()
    had = broken_off(world, first)
    assert 0 < len(had) < N
    world.settle(0.1)
    second = world.client("second")
    second.submit("b", PROMPT, N, claim="c-1", have=had)
    assert isinstance(ended(world, second, "b"), Done)
    assert second.replies["b"] == plain_reply(PROMPT, N)[0]
    assert n_opens(world) == 1
    verdicts = [(rows, n) for _, rows, n in world.verdicts() if rows > 1]
    assert any(n == rows - 1 for rows, n in verdicts)
    assert any(n < rows - 1 for rows, n in verdicts)
    assert {"dflash_resumes_total 1.0", "dflash_kept_replies 1.0"} <= exposed(world)
    assert world.is_idle()


def test_resume_from_inside_a_round_cuts_its_tokens_there():
    """A client may have shown less than it was sent."""
    world, first = world_of()
    had = broken_off(world, first)
    expected, _ = plain_reply(PROMPT, N)
    for number, index in enumerate((1, 2, 3, 5, len(had) - 1)):
        client = world.client(f"again-{number}")
        client.submit("b", PROMPT, N, claim="c-1", have=expected[:index])
        world.settle(0.05)
        assert client.replies["b"] == expected[: len(client.replies["b"])]
        assert len(client.replies["b"]) >= len(had)
        leave(world, client)
    assert n_opens(world) == 1


def test_late_resume_of_a_finished_request_gets_its_end():
    """The client was away while the last tokens came."""
    world, first = world_of()
    had = broken_off(world, first)
    world.settle(20.0)
    assert not len(world.hub.requests)
    second = world.client("second")
    second.submit("a", PROMPT, N, claim="c-1", have=had)
    assert ended(world, second).n_tokens == N
    assert n_opens(world) == 1


def test_reply_is_forgotten_after_its_time():
    """What is kept is bounded in time; a claim that is forgotten is named."""
    world, first = world_of(resume_s=5.0)
    had = broken_off(world, first)
    world.settle(20.0)
    second = world.client("second")
    second.submit("a", PROMPT, N, claim="c-1", have=had)
    end = ended(world, second)
    assert (end.code, "'c-1'" in end.message) == ("unknown_claim", True)
    assert len(world.hub.readers) == 0


def test_stream_goes_on_though_its_target_is_lost_while_nobody_reads():
    """Both sides of the coordinator break; the reply is replayed and kept all the same."""
    world, first = world_of()
    world.target("target.2")
    world.settle()
    had = broken_off(world, first)
    world.mesh.kill("target.1")
    world.settle(0.3)
    second = world.client("second")
    second.submit("a", PROMPT, N, claim="c-1", have=had[:2])
    assert isinstance(ended(world, second), Done)
    assert second.replies["a"] == plain_reply(PROMPT, N)[0]
    assert [o.n_replayed > 0 for o in world.targets["target.2"][0].opens] == [True]


def test_request_whose_client_stays_away_ends_after_the_grace():
    """A target must not work for nobody; the drafter's place is free again too."""
    world, first = world_of(resume_s=0.5)
    broken_off(world, first, n=4000)
    world.settle(0.3)
    assert len(world.hub.requests) == 1
    world.settle(0.4)
    assert world.is_idle()
    assert not world.targets["target.1"][0].sessions
    assert not world.drafters["drafter.1"][0].sessions


def test_without_a_claim_a_lost_client_ends_its_request_at_once():
    """What nobody can come back for must not run on."""
    world, first = world_of()
    first.submit("a", PROMPT, 1000)
    world.settle(0.2)
    leave(world, first)
    world.settle(0.05)
    assert world.is_idle()


def test_same_submit_again_on_a_new_connection_runs_once():
    """Idempotent submit: the answer to the first was lost, the work was not."""
    world, first = world_of()
    broken_off(world, first, seconds=0.001)
    second = world.client("second")
    second.submit("a", PROMPT, N, claim="c-1")
    assert isinstance(ended(world, second), Done)
    assert second.replies["a"] == plain_reply(PROMPT, N)[0]
    assert n_opens(world) == 1


def test_former_connection_that_still_stands_is_told():
    """Two readers of one reply would each believe to be the only one."""
    world, first = world_of()
    first.submit("a", PROMPT, N, claim="c-1")
    world.settle(0.2)
    second = world.client("second")
    second.submit("a", PROMPT, N, claim="c-1", have=first.replies["a"][:3])
    world.finish()
    assert first.ends["a"].code == "cancelled"
    assert "another connection" in first.ends["a"].message
    assert isinstance(second.ends["a"], Done)
    assert second.replies["a"] == plain_reply(PROMPT, N)[0]


@pytest.mark.parametrize(
    ("changes", "code", "word"),
    [
        ({"claim": "c-2"}, "unknown_claim", "'c-2'"),
        ({"claim": ""}, "bad_request", "from_index"),
        ({"have": list(range(150))}, "bad_request", "from_index: 150"),
        ({"max_tokens": N + 1}, "bad_request", "'c-1'"),
        ({"temperature": 0.5}, "bad_request", "'c-1'"),
        ({"prompt_ids": [3, 1, 4]}, "bad_request", "'c-1'"),
        ({"draft": False}, "bad_request", "'c-1'"),
    ],
)
def test_what_does_not_fit_the_claim_is_refused_by_name(changes, code, word):
    """A resume that silently became something else would mix two replies."""
    world, first = world_of()
    had = broken_off(world, first)
    asked = {"prompt_ids": PROMPT, "max_tokens": N, "claim": "c-1", "have": had, **changes}
    second = world.client("second")
    second.submit("a", **asked)
    world.settle(0.05)
    assert (second.ends["a"].code, word in second.ends["a"].message) == (code, True)
    assert n_opens(world) == 1


def test_claim_belongs_to_the_key_that_showed_it():
    """A word that leaked in a log must not open another user's reply."""
    world, _ = world_of()
    hub = world.hub
    sampling = Sampling(max_tokens=50, ignore_eos=True)

    def say(peer, message, key):
        outgoing = hub.handle(peer, message, world.mesh.now, "client", key)
        return [message for whom, message in outgoing if whom == peer]

    for peer in ("alice", "eve"):
        say(peer, Hello("client", peer, MAJOR, MINOR, "test", 1), f"client/{peer}")
    submit = Submit("r", from_ids(PROMPT), sampling, claim="secret")
    say("alice", submit, "client/alice")
    stolen = Submit("r", from_ids(PROMPT), sampling, claim="secret", from_index=1)
    (answer,) = say("eve", stolen, "client/eve")
    assert (answer.code, "'secret'" in answer.message) == ("unknown_claim", True)
    assert [d.owner for d in hub.readers.of("alice")] == [("client/alice", "secret")]


def test_deadline_of_a_resume_counts_from_its_arrival():
    """The client says how long it waits from now on."""
    world, first = world_of()
    had = broken_off(world, first, n=4000, deadline_ms=60_000)
    second = world.client("second")
    second.submit("a", PROMPT, 4000, claim="c-1", have=had, deadline_ms=200)
    world.finish(limit_s=0.5)
    assert second.ends["a"].code == "deadline_exceeded"
    assert world.is_idle()


def test_replies_kept_after_their_end_are_bounded_in_number():
    """A busy day must not fill the memory; the oldest is forgotten first."""
    world, client = world_of(resume_s=3600.0)
    for number in range(MAX_ENDED + 5):
        client.submit(f"r{number}", PROMPT, 1, claim=f"c{number}")
        world.finish()
    readers = world.hub.readers
    assert len(readers) == MAX_ENDED
    late = world.client("late")
    late.submit("old", PROMPT, 1, claim="c0", have=[1])
    late.submit("new", PROMPT, 1, claim=f"c{MAX_ENDED}")
    world.finish()
    assert late.ends["old"].code == "unknown_claim"
    assert isinstance(late.ends["new"], Done)


def test_name_of_an_ended_request_may_be_used_again():
    """A kept reply must not make a new request look like a repeated one."""
    world, client = world_of()
    for number in range(2):
        client.ends.pop("a", None)
        client.submit("a", PROMPT, 8, claim=f"c{number}")
        assert isinstance(ended(world, client), Done)
    assert n_opens(world) == 2


# --------------------------------------------------------------------------- slow readers


def test_reader_that_stops_reading_stops_its_request_and_no_other():
    """Its tokens must not pile up, and others' rounds go on at the same pace."""

    def run(n_slow):
        world, client = world_of()
        for number in range(n_slow):
            slow = world.client(f"slow-{number}")
            slow.reads_on = False
            slow.submit("s", PROMPT, 4000, window=32)
        world.settle(2.0)
        begun = world.mesh.now
        client.submit("a", PROMPT, N)
        done = world.mesh.run(lambda: "a" in client.ends, limit_s=60)
        assert done
        assert client.replies["a"] == plain_reply(PROMPT, N)[0]
        slow = [c.replies["s"] for name, c in world.clients.items() if name.startswith("slow")]
        return world.mesh.now - begun, [len(ids) for ids in slow]

    alone_s, _ = run(0)
    beside_s, had = run(3)
    assert all(32 <= n < 32 + 16 for n in had)
    assert beside_s < 1.05 * alone_s


def test_paused_request_goes_on_when_its_reader_reads_on():
    """A pause costs time, never output."""
    world, client = world_of()
    client.reads_on = False
    client.submit("a", PROMPT, N, window=32)
    while "a" not in client.ends:
        world.settle(1.0)
        client.read("a")
        world.settle(0.05)
    assert client.replies["a"] == plain_reply(PROMPT, N)[0]


def test_reader_that_never_reads_ends_with_a_typed_error():
    """A place at the target is not held for ever."""
    world, client = world_of(slow_reader_s=3.0)
    client.reads_on = False
    client.submit("a", PROMPT, N, window=32)
    end = ended(world, client)
    assert (end.code, "3 s" in end.message) == ("slow_reader", True)
    assert world.mesh.now < 5.0
    assert world.is_idle()


def test_resumed_reader_gets_what_it_missed_by_its_window():
    """A long absence must not come down in one burst over the link's mark."""
    world, first = world_of()
    had = broken_off(world, first, window=16)
    world.settle(10.0)
    second = world.client("second")
    second.reads_on = False
    second.submit("a", PROMPT, N, claim="c-1", have=had, window=16)
    world.settle(0.1)
    assert 16 <= len(second.replies["a"]) - len(had) < 32
    second.reads_on = True
    second.read("a")
    assert isinstance(ended(world, second), Done)
    assert second.replies["a"] == plain_reply(PROMPT, N)[0]


@pytest.mark.parametrize("claim", ["", "c-1"])
def test_reader_without_a_window_at_the_links_mark_counts_as_lost(claim, monkeypatch):
    """Nothing is kept for a peer that takes nothing, but the reply of a claim."""
    world, first = world_of()
    other = world.client("other")
    world.settle()
    send, n_taken = world.mesh.send, 12

    def send_up_to_the_mark(sender, receiver, message):
        nonlocal n_taken
        n_taken -= receiver == "first"
        return send(sender, receiver, message) if n_taken >= 0 or receiver != "first" else False

    monkeypatch.setattr(world.mesh, "send", send_up_to_the_mark)
    first.submit("a", PROMPT, N, claim=claim)
    other.submit("o", PROMPT, N)
    world.mesh.run(lambda: "o" in other.ends)
    assert other.replies["o"] == plain_reply(PROMPT, N)[0]
    assert 0 < len(first.replies["a"]) < N
    world.settle(5.0)
    assert world.is_idle()
    world.clients.pop("first")
    second = world.client("second")
    second.submit("a", PROMPT, N, claim=claim or "c-1", have=first.replies["a"], window=32)
    world.finish()
    if claim:
        assert second.replies["a"] == plain_reply(PROMPT, N)[0]
    else:
        assert second.ends["a"].code == "unknown_claim"


def test_pause_ends_when_the_reader_goes_and_the_request_runs_to_its_end():
    """Within the grace the reply is made, so that a late resume gets it whole."""
    world, first = world_of()
    first.reads_on = False
    had = broken_off(world, first, seconds=3.0, window=32)
    assert len(had) < N
    world.settle(20.0)
    second = world.client("second")
    second.submit("a", PROMPT, N, claim="c-1", have=had)
    assert ended(world, second).n_tokens == N


def test_unread_end_is_given_up_with_a_typed_error():
    """Nothing waits for ever: a reader that came back and stops reading is told."""
    world, first = world_of(resume_s=5.0)
    had = broken_off(world, first)
    world.settle(3.0)
    second = world.client("second")
    second.reads_on = False
    second.submit("a", PROMPT, N, claim="c-1", have=had, window=16)
    assert ended(world, second).code == "slow_reader"
    assert len(world.hub.readers) == 0


def test_cancel_of_a_reply_that_is_not_read_up_is_answered_at_once():
    """Who wants no more must not be made to read what is left."""
    world, first = world_of()
    had = broken_off(world, first)
    world.settle(3.0)
    second = world.client("second")
    second.reads_on = False
    second.submit("a", PROMPT, N, claim="c-1", have=had, window=16)
    world.settle(0.1)
    second.cancel("a")
    world.finish(limit_s=0.1)
    assert second.ends["a"].code == "cancelled"


# --------------------------------------------------------------------------- cancels and deadlines


def in_phase(phase):
    """A world whose request "a" stands in a phase, and its client."""
    world, client = World(), None
    target = world.target(capacity=1)
    drafter = world.drafter(modes=(RIGHT,))
    client = world.client("first")
    world.settle()
    if phase == "queued":
        client.submit("b", PROMPT, 4000)
        world.settle(0.1)
    return world, client, target, drafter


def phase_of(world, client, name="a"):
    delivery = world.hub.readers.find(client.name, name)
    running = world.hub.requests.get(delivery.number) if delivery is not None else None
    return running.machine.phase.name if running is not None else ""


PHASES = {"queued": "WAITING", "prefill": "PREFILLING", "draft": "DRAFTING", "verify": "VERIFYING"}


@pytest.mark.parametrize("claim", ["", "c-1"])
@pytest.mark.parametrize("end", ["cancel", "deadline"])
@pytest.mark.parametrize("phase", PHASES)
def test_request_ends_in_every_phase_and_everything_is_freed(phase, end, claim):
    """Cancels leaked places; deadlines counted in some phases only."""
    world, client, target, drafter = in_phase(phase)
    client.submit("a", PROMPT, 4000, claim=claim, deadline_ms=5000 if end == "deadline" else 0)
    reached = world.mesh.run(lambda: phase_of(world, client) == PHASES[phase], limit_s=1.0)
    assert reached
    if end == "cancel":
        client.cancel("a")
    else:  # nobody answers any more in this phase
        world.mesh.partition("coordinator", "target.1")
        world.mesh.partition("coordinator", "drafter.1")
        for worker in world.hub.registry:
            worker.liveness.silence_s = 1e9
    world.mesh.run(lambda: "a" in client.ends, limit_s=0.05 if end == "cancel" else 5.1)
    code = {"cancel": "cancelled", "deadline": "deadline_exceeded"}[end]
    assert client.ends["a"].code == code
    for worker in ("target.1", "drafter.1"):
        world.mesh.heal("coordinator", worker)
    client.cancel("b")
    world.settle(0.1)
    assert world.is_idle()
    if end == "cancel":  # a Close that a partition swallowed is found out by the worker's own ways
        assert not target.sessions
        assert not drafter.sessions


# --------------------------------------------------------------------------- under faults


@pytest.mark.parametrize("group", range(4))
def test_reply_is_the_plain_one_over_any_number_of_broken_connections(group):
    """Drops, doubles, delays, kills of clients and of drafters: contiguous, once, the plain ids."""
    n_resumed = n_faults = 0
    for seed in range(group, 40, 4):
        rng = random.Random(seed)
        world = World(seed, mode=rng.choice(["fixed", "adaptive"]))
        world.target()
        world.drafter(modes=(RIGHT, "wrong at 3", RIGHT))
        world.settle()
        lossy = Faults(drop=0.05, duplicate=0.1, delay_s=(0.0001, rng.choice([0.0002, 0.003])))
        for name in ("target.1", "drafter.1"):
            world.mesh.fault("coordinator", name, lossy)
            world.mesh.fault(name, "coordinator", lossy)
        world.mesh.at(0.4, lambda world=world: world.mesh.kill("drafter.1"))
        had, life = [], 0
        while True:
            client = world.client(f"life-{life}")
            world.mesh.fault(client.name, "coordinator", Faults(duplicate=0.3))
            client.submit("a", PROMPT, 120, claim="c", have=had, window=rng.choice([0, 16, 64]))
            world.mesh.run(lambda c=client: "a" in c.ends, limit_s=rng.uniform(0.01, 0.4))
            had = client.replies["a"][: max(len(had), len(client.replies["a"]) - rng.randrange(4))]
            if "a" in client.ends:
                break
            leave(world, client)
            world.settle(rng.uniform(0.0, 0.2))
            life += 1
        assert client.replies["a"] == plain_reply(PROMPT, 120)[0], seed
        assert isinstance(client.ends["a"], Done)
        assert len({o.session for o in world.targets["target.1"][0].opens}) == 1
        assert world.is_idle()
        n_resumed += life
        n_faults += world.mesh.counts.dropped + world.mesh.counts.duplicated
    assert min(n_resumed, n_faults) > 10


def test_stray_words_about_requests_are_ignored():
    """A Read or Cancel of a request that is not there is no fault of anybody."""
    world, client = world_of()
    for message in (Read("x", 3), Cancel("x")):
        client.send(message)
    client.submit("a", PROMPT, 8, window=4)
    client.send(Read("a", 10_000))  # more than was sent: it counts as all that was
    assert isinstance(ended(world, client), Done)
    assert not isinstance(client.ends["a"], Failed | Bye)
