"""Client and AsyncClient against a scripted coordinator on a real ipc socket."""

import asyncio
import socket
import subprocess
import sys
import threading

import pytest
from support.scripted_coordinator import ScriptedCoordinator, reply

from common.errors import (
    AuthRefused,
    BadRequest,
    Busy,
    Cancelled,
    DFlashError,
    NotReady,
    PeerLost,
    VersionMismatch,
)
from common.sampling import derived_seed
from common.sdk import AsyncClient, Client, ModelInfo, ProgressEvent, TokenEvent
from common.wire.messages import Failed, Reject


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/c.sock"


def _deep(depth):
    nested = []
    for _ in range(depth):
        nested = [nested]
    return {"role": "user", "content": nested}


def count_down(submit):
    return reply(submit, (5,), (4, 3, 2), (1,), tail="!")


def test_generate_returns_text_ids_seed_and_statistics(address):
    """The six-line example of the README."""
    with ScriptedCoordinator(address, count_down), Client(endpoint=address) as client:
        done = client.generate("def f(", max_tokens=5, seed=11)
    assert done.text == "<5><4><3><2><1>!"
    assert done.token_ids == (5, 4, 3, 2, 1)
    assert (done.n_tokens, done.finish_reason, done.seed) == (5, "length", 11)
    assert done.stats["tokens_per_s"] >= 0
    assert set(done.as_json()) == {"text", "token_ids", "finish_reason", "seed", "stats"}


def test_what_was_asked_is_what_is_submitted(address):
    """A parameter that gets lost on the way is a parameter ignored."""
    with ScriptedCoordinator(address, count_down) as coordinator:
        with Client(endpoint=address) as client:
            client.generate("hé", max_tokens=5, draft=False, timeout_s=2.5, ignore_eos=True)
            client.generate(prompt_ids=[1, 2, 3])
        text, ids = coordinator.submits
    assert bytes(text.prompt.data).decode() == "hé"
    assert (text.sampling.max_tokens, text.sampling.ignore_eos) == (5, True)
    assert (text.draft, text.deadline_ms) == (False, 2500)
    assert (ids.prompt.dtype, ids.prompt.shape, ids.draft) == ("int32", (3,), True)
    assert text.request != ids.request


def test_stream_yields_progress_then_tokens(address):
    """A reader sees which tokens were drafts as they come."""
    with ScriptedCoordinator(address, count_down), Client(endpoint=address) as client:
        events = list(client.stream("x"))
    assert isinstance(events[0], ProgressEvent)
    assert events[2] == TokenEvent(1, (4, 3, 2), ("<4>", "<3>", "<2>"), 2, "<4><3><2>")


def test_requests_of_one_client_share_a_connection_in_turn(address):
    """A handshake per request would cost every short request its latency."""
    with ScriptedCoordinator(address, count_down) as coordinator:
        with Client(endpoint=address) as client:
            client.generate("x")
            client.generate("x")
        assert len(coordinator.hellos) == 1


def test_a_client_serves_several_threads_at_once(address):
    """Two streams at a time must not read each other's messages."""
    gate = threading.Event()

    def answer(submit):
        messages = reply(submit, (submit.sampling.seed,) * 2, (7,))
        return [messages[0], gate, *messages[1:]]

    with ScriptedCoordinator(address, answer) as coordinator, Client(endpoint=address) as client:
        results = {}

        def ask(seed):
            results[seed] = client.generate("x", seed=seed).token_ids

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in (3, 4)]
        for thread in threads:
            thread.start()
        while len(coordinator.submits) < 2:
            threading.Event().wait(0.005)
        gate.set()
        for thread in threads:
            thread.join(5)
    assert results == {3: (3, 3, 7), 4: (4, 4, 7)}


def test_leaving_the_loop_cancels_the_request(address):
    """Nobody reads on: the target must not go on either."""
    never = threading.Event()

    def answer(submit):
        return [*reply(submit, (1,))[:2], never]

    with ScriptedCoordinator(address, answer) as coordinator:
        with Client(endpoint=address) as client:
            for event in client.stream("x"):
                if isinstance(event, TokenEvent):
                    break
            wait_for(lambda: coordinator.cancelled or coordinator.lost)
        never.set()


def wait_for(condition):
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.005)
    raise AssertionError("not within 5 s")


def test_cancel_from_another_thread_ends_the_iteration(address):
    """Ctrl-C in a user interface."""
    never = threading.Event()

    def answer(submit):
        return [*reply(submit, (1,))[:2], never]

    with ScriptedCoordinator(address, answer) as coordinator:
        with Client(endpoint=address) as client:
            stream = client.stream("x")
            threading.Timer(0.05, stream.cancel).start()
            with pytest.raises(Cancelled):
                list(stream)
            assert coordinator.cancelled == [coordinator.submits[0].request]
        never.set()


def test_failure_keeps_its_type_and_its_retry_time(address):
    """`except Busy as e: sleep(e.retry_after_s)` must work."""

    def answer(submit):
        return [Failed(submit.request, "busy", "queue: 64 waiting", retry_after_s=1.5)]

    with (
        ScriptedCoordinator(address, answer),
        Client(endpoint=address) as client,
        pytest.raises(Busy, match="64 waiting") as caught,
    ):
        client.generate("x")
    assert caught.value.retry_after_s == 1.5


def test_coordinator_that_dies_ends_the_stream_at_once(address):
    """A dead system is an error within a moment, not a hang."""
    first = threading.Event()
    never = threading.Event()

    def answer(submit):
        return [*reply(submit, (1,))[:2], never]

    with Client(endpoint=address) as client:
        with ScriptedCoordinator(address, answer):
            stream = iter(client.stream("x"))
            next(stream)
            next(stream)
            first.set()
        with pytest.raises(PeerLost):
            next(stream)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("version_mismatch", VersionMismatch),
        ("auth_refused", AuthRefused),
        ("draining", DFlashError),
    ],
)
def test_refused_hello_is_a_typed_error(address, code, kind):
    """An old client must be told so, and by whom."""
    rejection = Reject(code=code, message="this side speaks 9.0")
    with (
        ScriptedCoordinator(address, count_down, welcome=rejection),
        Client(endpoint=address) as client,
        pytest.raises(kind, match=r"9\.0"),
    ):
        client.generate("x")


def test_nobody_listening_is_not_ready(address, monkeypatch):
    """A wrong endpoint ends within the connection's time."""
    monkeypatch.setattr("common.net.zeromq.ClientLink.connect.__defaults__", (0.1,))
    with Client(endpoint=address) as client, pytest.raises(NotReady, match="is it running"):
        client.generate("x")


def test_socket_that_a_killed_system_left_counts_as_no_system(tmp_path, monkeypatch):
    """Else a client waits for its connection to a file nobody serves."""
    monkeypatch.setenv("DFLASH_RUN_RUN_DIR", str(tmp_path))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "control.sock"))
    listener.close()
    with pytest.raises(PeerLost, match="dflash-up up"):
        Client()


def test_no_running_system_names_the_way_to_start_one(tmp_path, monkeypatch):
    """The first thing every newcomer sees."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(PeerLost, match="dflash-up up"):
        Client("nothing-here")


@pytest.mark.parametrize(
    ("arguments", "options", "kind"),
    [
        (("x",), {"acceptance": "lucky"}, BadRequest),
        (("x",), {"temprature": 1.0}, BadRequest),
        (("x",), {"messages": [{"role": "user"}]}, BadRequest),
        (("x",), {"tools": []}, BadRequest),
        ((), {"messages": [{"role": {1}}]}, BadRequest),
        ((), {"messages": 5}, BadRequest),
        ((), {"messages": [_deep(5000)]}, BadRequest),
        ((), {"messages": [], "tools": 5}, BadRequest),
        ((), {"messages": [], "template_kwargs": 5}, BadRequest),
        (("x",), {"max_tokens": 0}, BadRequest),
        (("x",), {"stop": 5}, BadRequest),
        (("x",), {"stop_ids": 5}, BadRequest),
        (("x",), {"logit_bias": [5]}, BadRequest),
        (("x",), {"draft": "no"}, BadRequest),
        (("x",), {"allow_special": "no"}, BadRequest),
        (("x",), {"timeout_s": "5"}, BadRequest),
        (("x",), {"resume_s": "5"}, BadRequest),
        (("x",), {"timeout_s": 0}, BadRequest),
        ((), {}, BadRequest),
        (("x",), {"prompt_ids": [1]}, BadRequest),
        ((), {"prompt_ids": [1, -1]}, BadRequest),
        ((), {"prompt_ids": ["a"]}, BadRequest),
        (("\ud800",), {}, BadRequest),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_sent(address, arguments, options, kind):
    """No connection is needed to say what is wrong."""
    with Client(endpoint=address) as client, pytest.raises(kind):
        client.generate(*arguments, **options)


def test_status_is_the_coordinators(address):
    """`ps` and dashboards read it."""
    status = {"state": "ready", "workers": [{"name": "target.1"}]}
    with ScriptedCoordinator(address, count_down, status), Client(endpoint=address) as client:
        assert client.status() == status


def test_async_client_runs_requests_side_by_side(address):
    """The same verbs, awaited."""

    async def main():
        async with AsyncClient(endpoint=address) as client:
            first, second = await asyncio.gather(client.generate("x"), client.generate("y"))
            events = [event async for event in client.stream("z")]
            return first, second, events, await client.status()

    with ScriptedCoordinator(address, count_down):
        first, second, events, status = asyncio.run(main())
    assert first.token_ids == second.token_ids == (5, 4, 3, 2, 1)
    assert events[-1].text == "!"
    assert "workers" in status


def test_cancelled_task_cancels_the_request(address):
    """`asyncio.timeout` around generate must free the target."""
    never = threading.Event()

    def answer(submit):
        return [*reply(submit, (1,))[:2], never]

    async def main():
        async with AsyncClient(endpoint=address) as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.generate("x"), 0.1)

    with ScriptedCoordinator(address, answer) as coordinator:
        asyncio.run(main())
        wait_for(lambda: coordinator.cancelled or coordinator.lost)
        never.set()


STATUS = {
    "state": "ready",
    "requests": {"running": 2, "queued": 1},
    "counters": {"stop": 4},
    "workers": [
        *(
            {
                "name": f"target.{index}",
                "role": "target",
                "state": state,
                "counters": {"verifies": index},
                "model": {"model_type": "qwen4_exp", "vocab_size": 64, "context_len": 128},
            }
            for index, state in ((1, "ready"), (2, "busy"), (3, "starting"))
        ),
        {"name": "drafter.1", "role": "drafter", "state": "ready", "model": {}},
    ],
}


def test_looks_are_read_out_of_the_status(address):
    """A target that still loads serves nothing; one model is listed once."""
    with ScriptedCoordinator(address, count_down, STATUS), Client(endpoint=address) as client:
        health, models, stats = client.health(), client.models(), client.stats()
    assert health.is_ready
    assert (health.n_running, health.n_queued) == (2, 1)
    assert health.workers["target.3"] == "starting"
    assert models == [ModelInfo("qwen4_exp", 64, 128, ("target.1", "target.2"))]
    assert stats["requests"] == {"stop": 4}
    assert stats["workers"]["target.2"] == {"verifies": 2}


def test_looks_are_awaited_alike(address):
    """Two clients that answer differently are two bugs to find."""

    async def main():
        async with AsyncClient(endpoint=address) as client:
            return await client.health(), await client.models(), await client.stats()

    with ScriptedCoordinator(address, count_down, STATUS), Client(endpoint=address) as client:
        assert asyncio.run(main()) == (client.health(), client.models(), client.stats())


def test_completions_are_awaited_side_by_side(address):
    """Each with a seed of its own, the first with the request's."""

    async def main():
        async with AsyncClient(endpoint=address) as client:
            return await client.generate_n(3, "x", seed=7, temperature=1.0)

    with ScriptedCoordinator(address, count_down) as coordinator:
        replies = asyncio.run(main())
    assert len(replies) == 3
    seeds = {submit.sampling.seed for submit in coordinator.submits}
    assert seeds == {derived_seed(7, index) for index in range(3)}


def test_a_process_that_was_forked_and_executed_has_a_client_of_its_own(address):
    """Sockets of the parent must not be shared, nor the parent's client be harmed."""
    code = (
        "import sys; from common.sdk import Client\n"
        "with Client(endpoint=sys.argv[1]) as client: print(client.generate('x').token_ids)"
    )
    with ScriptedCoordinator(address, count_down), Client(endpoint=address) as client:
        before = client.generate("x").token_ids
        with client.stream("x") as stream:  # a connection in use while the child runs
            done = subprocess.run(
                [sys.executable, "-c", code, address],
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
            )
            for _ in stream:
                pass
        after = client.generate("x").token_ids
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(before)
    assert before == after == stream.completion.token_ids
