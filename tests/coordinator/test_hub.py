"""The coordinator as its peers see it: one request, many, faults, ends, registration."""

import json
from dataclasses import replace

import pytest
from support.scripted import (
    CARD,
    DOUBTFUL,
    FAULTY,
    LATE,
    OUTSIDE,
    RIGHT,
    SILENT,
    WRONG,
    plain_reply,
    repeating_id,
)
from support.world import World

from common.errors import WireError
from common.net.inproc import Faults
from common.wire.messages import (
    Bye,
    Done,
    Drain,
    Drained,
    Failed,
    Hello,
    Reject,
    Sampling,
    Status,
    StatusRequest,
    Submit,
    Verified,
    WorkerExited,
)
from common.wire.tensors import Tensor
from common.wire.version import MAJOR, MINOR

PROMPT = [3, 1, 4, 1, 5]
STATS_KEYS = {
    "rounds",
    "drafted_rounds",
    "plain_rounds",
    "plain_reasons",
    "builds",
    "first_ms",
    "drafts_sent",
    "drafts_accepted",
    "acceptance_length",
    "accepted_by_position",
    "rows_histogram",
    "tokens_per_s",
    "ttft_s",
    "near_ties",
    "acceptance",
    "lossy",
    "ngram_hits",
    "ngram_misses",
    "cached_tokens",
}


def world_of(n_targets=1, n_drafters=1, *, modes=(RIGHT,), mode="fixed", target=None, **config):
    world = World(mode=mode, **config)
    for index in range(1, n_targets + 1):
        world.target(f"target.{index}", **(target or {}))
    for index in range(1, n_drafters + 1):
        world.drafter(f"drafter.{index}", modes=modes)
    client = world.client()
    world.settle()
    return world, client


def stats_of(client, request):
    return json.loads(client.ends[request].stats)


class Listener:
    """A peer that keeps what it is sent."""

    def __init__(self, world, name, role="admin", **changes):
        self.got, self.world, self.name = [], world, name
        world.mesh.add(name, on_message=lambda _, message, now: self.got.append(message))
        hello = {"major": MAJOR, "minor": MINOR, "build": "test", "pid": 1, **changes}
        self.send(Hello(role, name, **hello))

    def send(self, message):
        self.world.mesh.send(self.name, "coordinator", message)

    def run(self, message, seconds=0.05):
        self.send(message)
        self.world.settle(seconds)
        return self.got

    def of(self, kind):
        return [message for message in self.got if isinstance(message, kind)]


# --------------------------------------------------------------------------- one request


@pytest.mark.parametrize("mode", ["fixed", "adaptive"])
def test_reply_is_the_plain_one_and_was_drafted(mode):
    """An equality test that compares plain with plain proves nothing."""
    world, client = world_of(mode=mode, modes=(RIGHT, WRONG, "wrong at 3", RIGHT))
    client.submit("a", PROMPT, 64)
    world.finish()
    stats = stats_of(client, "a")
    assert client.replies["a"] == plain_reply(PROMPT, 64)[0]
    assert stats["drafted_rounds"] > 0
    assert 0 < stats["drafts_accepted"] < stats["drafts_sent"]
    assert any(rows > 1 and n == rows - 1 for _, rows, n in world.verdicts())


def test_stats_hold_exactly_the_documented_keys_and_add_up():
    """Scripts read these keys; a number that does not add up is worse than none."""
    world, client = world_of(modes=(RIGHT, "wrong at 3"))
    client.submit("a", PROMPT, 40)
    world.finish()
    stats = stats_of(client, "a")
    rounds_of_tokens = stats["acceptance_length"] * stats["drafted_rounds"] + stats["plain_rounds"]
    assert set(stats) == STATS_KEYS
    assert stats["rounds"] == stats["drafted_rounds"] + stats["plain_rounds"]
    assert stats["rounds"] == sum(stats["rows_histogram"].values())
    assert stats["plain_rounds"] == sum(stats["plain_reasons"].values())
    assert stats["rounds"] == sum(stats["builds"].values())
    assert stats["drafts_accepted"] == sum(stats["accepted_by_position"])
    assert rounds_of_tokens == pytest.approx(40 - 1)
    assert stats["ngram_misses"] == len(PROMPT) + stats["drafts_sent"] + stats["rounds"]
    assert stats["cached_tokens"] == len(PROMPT) - 1
    assert stats["ngram_hits"] == 1 + 2 * stats["drafts_sent"]
    assert stats["ttft_s"] > 0
    assert stats["tokens_per_s"] > 0


def test_request_without_draft_never_reaches_a_drafter():
    """`--no-draft` promises no taps and no features."""
    world, client = world_of()
    client.submit("a", PROMPT, 20, draft=False)
    world.finish()
    assert client.replies["a"] == plain_reply(PROMPT, 20)[0]
    assert world.drafters["drafter.1"][0].attached == []
    assert [(o.taps, o.ticket) for o in world.targets["target.1"][0].opens] == [(False, "")]


@pytest.mark.parametrize("mode", ["fixed", "adaptive"])
def test_copies_of_earlier_text_are_drafts_like_any_other(mode):
    """Text that repeats itself needs no drafter; a surprise costs no output."""
    world = World(mode=mode, copies=True)
    world.target(rule=repeating_id)
    client = world.client()
    world.settle()
    client.submit("a", range(1, 31), 150)
    world.finish()
    stats = stats_of(client, "a")
    assert client.replies["a"] == plain_reply(range(1, 31), 150, rule=repeating_id)[0]
    assert 0 < stats["drafts_accepted"] < stats["drafts_sent"]
    assert stats["rounds"] < 100


@pytest.mark.parametrize("mode", ["fixed", "adaptive"])
def test_a_target_that_drafts_for_itself_needs_no_drafter(mode):
    """A head that is loaded and never asked, or a drafter tied to a session beside it."""
    world = World(mode=mode)
    target = world.target(notes={"source": "mtp"})
    drafter = world.drafter()
    client = world.client()
    world.settle()
    client.submit("a", PROMPT, 60)
    client.submit("b", PROMPT, 20, draft=False)
    world.finish()
    stats = stats_of(client, "a")
    assert client.replies["a"] == plain_reply(PROMPT, 60)[0]
    assert client.replies["b"] == plain_reply(PROMPT, 20)[0]
    assert 0 < stats["drafts_accepted"] < stats["drafts_sent"]
    assert stats_of(client, "b")["drafts_sent"] == 0
    assert drafter.attached == []
    assert [(o.taps, o.ticket) for o in target.opens] == [(True, ""), (False, "")]


def test_without_copies_configured_nothing_is_copied():
    """Copies are asked for, or do not happen."""
    world = World(copies=False)
    world.target(rule=repeating_id)
    client = world.client()
    world.settle()
    client.submit("a", range(1, 31), 60)
    world.finish()
    assert stats_of(client, "a")["drafts_sent"] == 0


def test_stop_token_ends_the_text_before_it():
    """The token that ends the text is not part of it."""
    prompt = next([n] for n in range(1, 50) if plain_reply([n], 64, ignore_eos=False)[1] == "stop")
    world, client = world_of()
    client.submit("a", prompt, 64, ignore_eos=False)
    world.finish()
    assert client.replies["a"] == plain_reply(prompt, 64, ignore_eos=False)[0]
    assert client.ends["a"].finish_reason == "stop"


def test_one_token_needs_no_round():
    """max_tokens of one ends with prefill."""
    world, client = world_of()
    client.submit("a", PROMPT, 1)
    world.finish()
    assert client.replies["a"] == plain_reply(PROMPT, 1)[0]
    assert stats_of(client, "a")["rounds"] == 0


def test_prefill_does_not_wait_for_a_drafter():
    """A drafter that is not there must not cost the first token."""
    world, client = world_of(n_drafters=0)
    client.submit("a", PROMPT, 20)
    world.mesh.at(0.1, lambda: world.drafter())
    world.finish()
    assert client.replies["a"] == plain_reply(PROMPT, 20)[0]
    assert stats_of(client, "a")["plain_rounds"] > 0
    assert stats_of(client, "a")["drafted_rounds"] > 0


def test_repeated_submit_runs_once():
    """A doubled message must not run a request twice."""
    world, client = world_of()
    world.mesh.fault("client", "coordinator", Faults(duplicate=1.0))
    client.submit("a", PROMPT, 8)
    world.finish()
    assert len(world.targets["target.1"][0].opens) == 1


# --------------------------------------------------------------------------- drafters that fail


@pytest.mark.parametrize("fault", [LATE, SILENT, FAULTY, DOUBTFUL, OUTSIDE, WRONG])
def test_bad_drafter_costs_time_and_never_output(fault):
    """Drafts are advice: late, missing, lying or out of the vocabulary."""
    world, client = world_of(modes=(RIGHT, fault))
    client.submit("a", PROMPT, 48)
    world.finish()
    assert client.replies["a"] == plain_reply(PROMPT, 48)[0]
    assert stats_of(client, "a")["drafted_rounds"] > 0
    assert world.drafters["drafter.1"][0].asked > 1


def test_three_late_drafts_in_a_row_close_the_circuit():
    """A dead-slow drafter must not cost its deadline in every round."""
    world, client = world_of(modes=(SILENT,))
    client.submit("a", PROMPT, 40)
    world.finish()
    assert world.drafters["drafter.1"][0].asked <= 6
    assert stats_of(client, "a")["plain_rounds"] == 39


def test_drafter_that_sends_junk_is_left_alone_for_a_while():
    """Bytes that are no message are strikes, and reach nobody else."""
    world, client = world_of()
    drafter = next(w for w in world.hub.registry if w.role == "drafter")
    for _ in range(3):
        world.hub.bad(drafter.peer, WireError("junk"), world.mesh.now)
    client.submit("a", PROMPT, 20)
    world.finish()
    assert client.replies["a"] == plain_reply(PROMPT, 20)[0]
    assert world.drafters["drafter.1"][0].asked == 0


def test_killed_drafter_is_replaced_by_the_next_one_that_registers():
    """Speculation resumes after a restart, with a new ticket and the features fed again."""
    world, client = world_of()
    client.submit("a", PROMPT, 120)
    world.mesh.at(0.1, lambda: world.mesh.kill("drafter.1"))
    world.mesh.at(0.2, lambda: world.drafter())
    world.finish()
    first, second = world.drafters["drafter.1"]
    assert client.replies["a"] == plain_reply(PROMPT, 120)[0]
    assert second.asked > 0
    assert {a.ticket for a in first.attached}.isdisjoint(a.ticket for a in second.attached)
    assert stats_of(client, "a")["plain_rounds"] > 0


def test_other_drafter_takes_over_at_once():
    """With two drafters a lost one costs a round or two, not the speed of the request."""
    world, client = world_of(n_drafters=2)
    client.submit("a", PROMPT, 120)
    world.mesh.at(0.1, lambda: world.mesh.kill("drafter.1"))
    world.finish()
    assert client.replies["a"] == plain_reply(PROMPT, 120)[0]
    assert all(life[0].asked > 0 for life in world.drafters.values())


def test_features_lost_on_the_data_link_are_asked_for_again():
    """A gap in the features is closed by Resync, not by a wrong context."""
    world, client = world_of()
    world.mesh.fault("target.1", "drafter.1", Faults(drop=0.3))
    client.submit("a", PROMPT, 120)
    world.finish()
    assert client.replies["a"] == plain_reply(PROMPT, 120)[0]
    assert world.mesh.counts.dropped > 0
    assert stats_of(client, "a")["drafts_accepted"] > 0


# --------------------------------------------------------------------------- targets that fail


def test_lost_target_without_another_is_a_typed_error_with_the_tokens_so_far():
    """A dead target must never be a hang."""
    world, client = world_of()
    client.submit("a", PROMPT, 200)
    world.mesh.at(0.2, lambda: world.mesh.kill("target.1"))
    world.finish(limit_s=1.0)
    end = client.ends["a"]
    assert isinstance(end, Failed)
    assert end.code == "peer_lost"
    assert 0 < len(client.replies["a"]) < 200
    assert client.replies["a"] == plain_reply(PROMPT, len(client.replies["a"]))[0]


def test_lost_target_is_replayed_on_another_one():
    """The delivered prefix never changes and no token is repeated."""
    world, client = world_of(n_targets=2)
    for name in ("a", "b"):
        client.submit(name, PROMPT, 100)
    world.mesh.at(0.2, lambda: world.mesh.kill("target.1"))
    world.finish()
    assert [client.replies[name] for name in ("a", "b")] == [plain_reply(PROMPT, 100)[0]] * 2
    replayed = [o for o in world.targets["target.2"][0].opens if o.n_replayed]
    assert [o.epoch for o in replayed] == [1]
    assert stats_of(client, "a")["drafted_rounds"] > 0


def test_wedged_target_is_found_by_its_progress_clock():
    """A busy loop answers pings for ever."""
    world, client = world_of(n_targets=2, prefill_budget_ms=3000.0, verify_budget_ms=3000.0)
    client.submit("a", PROMPT, 100)

    def wedge():
        world.targets["target.1"][0].is_wedged = True

    world.mesh.at(0.2, wedge)
    world.finish(limit_s=10.0)
    assert client.replies["a"] == plain_reply(PROMPT, 100)[0]


def test_silent_target_is_lost_after_missed_heartbeats():
    """A cut cable tells nobody."""
    world, client = world_of()
    client.submit("a", PROMPT, 200)
    world.mesh.at(0.1, lambda: world.mesh.partition("target.1", "coordinator"))
    world.finish(limit_s=3.0)
    assert client.ends["a"].code == "peer_lost"


def test_verdict_that_cannot_be_true_ends_the_request():
    """A target that accepts more than it was given must not reach the client."""
    world, client = world_of(n_drafters=0)
    target = world.targets["target.1"][0]
    honest = target.say

    def lie(message):
        if isinstance(message, Verified):
            message = Verified(message.key, 9, 8, (1,) * 9, ("x",) * 9, "", "", 0, 1.0, 0.0)
        honest(message)

    target.say = lie
    client.submit("a", PROMPT, 20)
    world.finish()
    assert client.ends["a"].code == "bad_message"
    assert world.is_idle()


# --------------------------------------------------------------------------- many requests


def test_requests_spread_over_targets_and_drafters():
    """The least loaded worker takes the next session."""
    world, client = world_of(n_targets=2, n_drafters=2)
    for number in range(4):
        client.submit(f"r{number}", [number + 1], 30)
    world.finish()
    assert [len(life[0].opens) for life in world.targets.values()] == [2, 2]
    assert [len(life[0].attached) for life in world.drafters.values()] == [2, 2]


def test_requests_in_flight_advance_together():
    """One long request must not hold up the others on the same target."""
    world, client = world_of()
    for number in range(4):
        client.submit(f"r{number}", [number + 1], 60)
    world.mesh.run(lambda: any(len(r) >= 30 for r in client.replies.values()), limit_s=30)
    assert min(len(reply) for reply in client.replies.values()) >= 10
    world.finish()
    for number in range(4):
        assert client.replies[f"r{number}"] == plain_reply([number + 1], 60)[0]


def test_clients_take_turns_in_the_queue():
    """One client with many requests must not shut out another."""
    world, client = world_of(target={"capacity": 1})
    other = world.client("other")
    for number in range(6):
        client.submit(f"r{number}", PROMPT, 8)
    other.submit("x", PROMPT, 8)
    world.mesh.run(lambda: "x" in other.ends, limit_s=30)
    assert len(client.ends) <= 2
    world.finish()


def test_full_queue_answers_busy_and_when_to_come_back():
    """Overload must not grow a queue without end."""
    world, client = world_of(target={"capacity": 1}, max_queue=2)
    for number in range(5):
        client.submit(f"r{number}", PROMPT, 8)
    world.finish()
    busy = [end for end in client.ends.values() if isinstance(end, Failed)]
    assert [end.code for end in busy] == ["busy", "busy"]
    assert all(end.retry_after_s >= 1.0 for end in busy)
    assert sum(isinstance(end, Done) for end in client.ends.values()) == 3


def test_requests_wait_for_the_first_target():
    """Submitting while the system starts is no error."""
    world = World()
    client = world.client()
    world.settle()
    client.submit("a", PROMPT, 8)
    world.settle(1.0)
    assert client.accepted["a"].queued_behind == 0
    world.target()
    world.finish()
    assert client.replies["a"] == plain_reply(PROMPT, 8)[0]


# --------------------------------------------------------------------------- ends


@pytest.mark.parametrize("moment_s", [0.0, 0.005, 0.03, 0.033, 0.05])
def test_cancel_in_every_phase_frees_every_place(moment_s):
    """Cancels leaked places at the workers."""
    world, client = world_of()
    client.submit("a", PROMPT, 100)
    world.mesh.at(moment_s, lambda: client.cancel("a"))
    world.finish()
    world.settle()
    assert client.ends["a"].code == "cancelled"
    assert world.is_idle()
    assert not world.targets["target.1"][0].sessions
    assert not world.drafters["drafter.1"][0].sessions


def test_cancel_in_the_queue():
    """A request that never began ends as quietly."""
    world, client = world_of(target={"capacity": 1})
    client.submit("a", PROMPT, 40)
    client.submit("b", PROMPT, 40)
    world.mesh.at(0.05, lambda: client.cancel("b"))
    world.finish()
    assert client.ends["b"].code == "cancelled"
    assert len(world.targets["target.1"][0].opens) == 1


def test_client_that_is_gone_stops_its_requests():
    """Nobody reads the answer, so nobody should make it."""
    world, client = world_of()
    client.submit("a", PROMPT, 1000)
    world.settle(0.2)
    world.mesh.kill("client")
    world.settle(0.2)
    assert world.is_idle()
    assert not world.targets["target.1"][0].sessions


def test_deadline_of_a_request_ends_it():
    """Every wait has a deadline, the client's own too."""
    world, client = world_of()
    client.submit("a", PROMPT, 1000, deadline_ms=300)
    world.finish(limit_s=0.5)
    assert client.ends["a"].code == "deadline_exceeded"
    assert client.replies["a"]
    assert world.is_idle()


@pytest.mark.parametrize(
    ("sampling", "code"),
    [({"max_tokens": 0}, "bad_request"), ({"acceptance": "lucky"}, "bad_request")],
)
def test_bad_parameters_are_refused_by_name(sampling, code):
    """A parameter is honoured or refused, never ignored."""
    world, client = world_of()
    client.submit("a", PROMPT, **sampling)
    world.finish()
    assert client.ends["a"].code == code
    assert next(iter(sampling)) in client.ends["a"].message


def test_going_down_lets_requests_finish_and_nothing_in():
    """A rolling restart must not fail what runs."""
    world, client = world_of()
    client.submit("a", PROMPT, 30)
    world.settle(0.1)
    world.hub.is_draining = True
    client.submit("b", PROMPT, 30)
    world.finish()
    assert isinstance(client.ends["a"], Done)
    assert client.ends["b"].code == "busy"


def test_closing_says_goodbye_to_everybody_and_ends_what_runs():
    """Workers and clients should not have to find out by silence."""
    world, client = world_of()
    client.submit("a", PROMPT, 1000)
    world.settle(0.2)
    outgoing = world.hub.close("stopped", world.mesh.now)
    assert sum(isinstance(message, Bye) for _, message in outgoing) == 3
    assert [m.code for _, m in outgoing if isinstance(m, Failed)] == ["peer_lost"]


# --------------------------------------------------------------------------- registration


def test_other_major_version_is_refused():
    """An old peer would misunderstand."""
    world, _ = world_of()
    listener = Listener(world, "old", "client", major=MAJOR + 1)
    world.settle()
    assert listener.of(Reject)[0].code == "version_mismatch"


def test_drafter_of_another_model_is_refused_and_both_are_named():
    """A wrong pairing would only show as bad acceptance."""
    world, _ = world_of()
    card = replace(CARD, head_hash="other")
    listener = Listener(world, "drafter.9", "drafter", card=card)
    world.settle()
    reject = listener.of(Reject)[0]
    assert reject.code == "model_mismatch"
    assert "target.1" in reject.message
    assert "drafter.9" in reject.message


def test_message_before_hello_is_answered_with_a_reject():
    """A worker that the coordinator forgot must learn that it has to register again."""
    world, _ = world_of()
    got = []
    world.mesh.add("stranger", on_message=lambda _, message, now: got.append(message))
    world.mesh.send("stranger", "coordinator", StatusRequest("s"))
    world.settle()
    assert isinstance(got[0], Reject)
    assert got[0].code == "not_ready"


def test_client_may_not_drain_workers():
    """A client's key opens a client's doors only."""
    world, _ = world_of()
    listener = Listener(world, "eve", "client")
    listener.run(Drain("target.1"))
    assert not listener.of(Drained)
    assert not world.targets["target.1"][0].said_bye


def test_key_of_another_role_is_refused():
    """The role is the key's, not what Hello says."""
    world, _ = world_of()
    hello = Hello("admin", "eve", MAJOR, MINOR, "test", 1)
    outgoing = world.hub.handle("eve", hello, 0.0, key_role="client")
    assert isinstance(outgoing[0].message, Reject)
    assert outgoing[0].message.code == "auth_refused"


def test_worker_that_registers_again_replaces_its_former_self():
    """A restart can be faster than the loss of the old connection is seen."""
    world, client = world_of()
    world.target("target.1")
    world.settle()
    assert [worker.name for worker in world.hub.registry].count("target.1") == 1
    client.submit("a", PROMPT, 8)
    world.finish()
    assert world.targets["target.1"][1].opens


# --------------------------------------------------------------------------- operating


def test_status_names_every_worker_and_counts_requests():
    """`ps` and the start-up view read this."""
    world, client = world_of()
    client.submit("a", PROMPT, 500)
    world.settle(0.1)
    admin = Listener(world, "admin")
    body = json.loads(admin.run(StatusRequest("s"))[-1].body)
    assert isinstance(admin.got[-1], Status)
    assert {(w["name"], w["state"]) for w in body["workers"]} == {
        ("target.1", "busy"),
        ("drafter.1", "busy"),
    }
    assert body["requests"] == {"running": 1, "queued": 0}
    assert body["state"] == "ready"


def test_drained_drafter_hands_its_sessions_over():
    """Scaling drafters down costs no request."""
    world, client = world_of(n_drafters=2)
    client.submit("a", PROMPT, 200)
    world.settle(0.1)
    admin = Listener(world, "admin")
    admin.run(Drain("drafter.1"))
    assert admin.of(Drained) == [Drained("drafter.1")]
    assert world.drafters["drafter.1"][0].said_bye
    world.finish()
    assert client.replies["a"] == plain_reply(PROMPT, 200)[0]
    assert world.drafters["drafter.2"][0].asked > 0


def test_drained_target_finishes_what_runs_and_takes_nothing_new():
    """Drained is said when the last session has ended, not before."""
    world, client = world_of(n_targets=2, n_drafters=0)
    client.submit("a", PROMPT, 30)
    world.settle(0.1)
    admin = Listener(world, "admin")
    admin.run(Drain("target.1"))
    assert not admin.of(Drained)
    client.submit("b", PROMPT, 10)
    world.finish()
    world.settle()
    assert admin.of(Drained) == [Drained("target.1")]
    assert len(world.targets["target.1"][0].opens) == 1


def test_unknown_worker_cannot_be_drained():
    """A typing error must not wait for ever."""
    world, _ = world_of()
    admin = Listener(world, "admin")
    admin.run(Drain("target.7"))
    assert admin.of(Failed)[0].name == "target.7"


def test_launchers_word_of_a_dead_process_counts_at_once():
    """The process table is faster than any heartbeat."""
    world, client = world_of()
    client.submit("a", PROMPT, 500)
    world.settle(0.1)
    world.mesh.stall("target.1")
    admin = Listener(world, "admin")
    admin.run(WorkerExited("target.1", "signal 9"))
    assert client.ends["a"].code == "peer_lost"


def test_prompt_that_is_no_text_is_refused():
    """Broken UTF-8 must not reach a target."""
    world, client = world_of()
    client.replies["a"] = []
    client.send(Submit("a", Tensor("uint8", (1,), b"\xff"), Sampling(max_tokens=4)))
    world.finish()
    assert client.ends["a"].code == "bad_tensor"
