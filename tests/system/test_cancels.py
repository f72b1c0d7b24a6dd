"""Cancels, deadlines and broken connections at random moments leave nothing behind anywhere.

One system of real processes serves all of it, with room for two sessions, so that most phases are
met: queued, prefill, draft, verify. What is left is read from outside: the workers' own counts in
their heartbeats, open descriptors and resident memory of every process.
"""

import contextlib
import random
import threading
import time
from collections import Counter

import psutil
import pytest
from support.cutter import Cutter
from support.running import prompt_files, prompt_of, running, wait_until

from common.errors import Cancelled, DeadlineExceeded, PeerLost
from common.net.transport import CONTROL_SOCKET
from common.sdk import Client, ProgressEvent, TokenEvent

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

N_AT_ONCE = 4  # clients, over a capacity of two: two wait in the queue
MB = 1024 * 1024
PROMPTS = [prompt_of(path) for path in prompt_files()[:4]]
ENDED = (Cancelled, DeadlineExceeded, PeerLost)


@pytest.fixture(scope="module")
def system():
    with running(
        DFLASH_TARGET_CAPACITY="2",
        DFLASH_TARGET_PREFIX_CACHE_MB="2",  # full at once: what it holds is no leak
        DFLASH_COORDINATOR_RESUME_S="0.5",
    ) as started:
        yield started


def cancel_once(client, rng):
    """Begin a request and leave it at a random moment in a random way; returns how far it was."""
    way = rng.choice(["leave", "cancel", "deadline", "lose", "lose with a claim"])
    options = {"max_tokens": 200, "ignore_eos": True, "draft": rng.random() < 0.8}
    if way == "deadline":
        options["timeout_s"] = rng.uniform(0.005, 0.4)
    if way == "lose":
        options["resume_s"] = 0
    n_events = rng.choice([0, 1, 2, 2, 3, 5, 8])
    reached = "submitted"
    try:
        stream = client.stream(rng.choice(PROMPTS)[-rng.choice([40, 300, 900]) :], **options)
        with stream:
            events = iter(stream)
            for _ in range(n_events if way != "deadline" else 10_000):
                event = next(events)
                if isinstance(event, ProgressEvent):
                    reached = event.phase
                elif isinstance(event, TokenEvent):
                    reached = "tokens"
            time.sleep(rng.uniform(0.0, 0.01))  # into a draft, a verify or between them
            if way == "cancel":
                stream.cancel()
                for _ in events:
                    pass
            elif way.startswith("lose"):
                stream._drop()  # as a process that dies: without a word
    except (*ENDED, StopIteration):
        pass
    return way, reached


def cancel_many(system, n, seed):
    """`n` requests that are left, from several threads; what was met, by way and by phase."""
    met, lock = Counter(), threading.Lock()

    def work(number):
        rng = random.Random(f"{seed}-{number}")
        with Client(run_dir=system.run_dir) as client:
            for _ in range(n // N_AT_ONCE):
                found = cancel_once(client, rng)
                with lock:
                    met.update(found)
                    met["all"] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(N_AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60 + n)
        assert not thread.is_alive()
    return met


def status_when_idle(system):
    """Wait until no request is left and every process says so itself."""
    with Client(run_dir=system.run_dir) as client:

        def idle():
            status = client.status()
            held = [worker["sessions"] + worker["held"] for worker in status["workers"]]
            is_idle = not sum(held) and not any(status["requests"].values())
            return status if is_idle else None

        return wait_until(idle, "no request, no session at any worker", 15)


def held_by(system, pids):
    """(descriptors, resident bytes) of each process, with no client connected."""
    time.sleep(0.6)  # replies with a claim are kept for half a second
    found = {}
    for name, pid in pids.items():
        process = psutil.Process(pid)
        found[name] = (process.num_fds(), process.memory_info().rss)
    return found


def pids_of(system):
    pids = {process["name"]: process["pid"] for process in system.ps()}
    assert {"coordinator", "target.1", "drafter.1"} <= set(pids)
    return pids


def judge(system, n, warm, seed, max_growth):
    """Cancel, and compare every process with itself before."""
    cancel_many(system, warm, f"warm-{seed}")
    status_when_idle(system)
    pids = pids_of(system)
    before = held_by(system, pids)
    met = cancel_many(system, n, seed)
    status_when_idle(system)

    def descriptors_are_back():
        now = held_by(system, pids)
        return now if all(now[name][0] <= before[name][0] for name in pids) else None

    after = wait_until(descriptors_are_back, f"descriptors as before: {before}", 10)
    growth = {name: (after[name][1] - before[name][1]) / MB for name in pids}
    print(f"\nmet {dict(met)}\nMB more {growth}\ndescriptors {before} {after}")
    assert pids_of(system) == pids  # nobody died and came back
    assert met["all"] == n
    assert min(met[way] for way in ("leave", "cancel", "deadline", "lose", "tokens")) > 0
    assert met["submitted"] + met["queued"] + met["accepted"] > 0
    assert max(growth.values()) < max_growth
    with Client(run_dir=system.run_dir, timeout_s=30) as client:
        stats = client.generate(PROMPTS[0], max_tokens=64, ignore_eos=True).stats
    assert stats["drafts_sent"] > 0


def test_sixty_cancels_leave_nothing_behind(system):
    """A place, a link or a descriptor that leaks ends every long-lived service."""
    judge(system, 60, 16, "short", max_growth=24)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_thousand_cancels_leave_nothing_behind(system):
    """No session, credit, descriptor or megabyte on any process."""
    judge(system, 1000, 400, "long", max_growth=16)


def test_stream_over_broken_connections_is_the_unbroken_one(system, tmp_path):
    """The whole system: the target runs once, and the ids are those of a quiet line."""
    options = {"max_tokens": 150, "ignore_eos": True, "seed": 3, "timeout_s": 60}
    with Client(run_dir=system.run_dir) as client:
        unbroken = client.generate(PROMPTS[1], **options)
    with (
        Cutter(tmp_path / "near.sock", system.run_dir / CONTROL_SOCKET) as cutter,
        Client(endpoint=cutter.address) as client,
        client.stream(PROMPTS[1], **options) as one,
    ):
        n_cuts = 0
        for event in one:
            if isinstance(event, TokenEvent) and event.index >= 40 * (n_cuts + 1):
                cutter.cut()
                n_cuts += 1
        broken = one.completion
    assert n_cuts >= 2
    assert one.n_resumed >= 2
    assert broken.token_ids == unbroken.token_ids or broken.stats["near_ties"] > 0
    assert (broken.text, broken.n_tokens) == (unbroken.text, 150) or broken.stats["near_ties"] > 0
    assert broken.stats["rounds"] > 0
    assert broken.stats["drafts_sent"] > broken.stats["drafts_accepted"] > 0
    status_when_idle(system)


def test_client_that_does_not_read_pauses_its_own_request_only(system):
    """Its tokens stay at one window; another client's stream is not held up."""
    options = {"max_tokens": 900, "ignore_eos": True}
    with contextlib.ExitStack() as opened:
        slow = opened.enter_context(Client(run_dir=system.run_dir))
        stream = opened.enter_context(slow.stream("import os\n", **options))
        events = iter(stream)
        while not isinstance(next(events), TokenEvent):
            pass
        quick = opened.enter_context(Client(run_dir=system.run_dir, timeout_s=60))

        def paused():
            workers = quick.status()["workers"]
            target = next(worker for worker in workers if worker["role"] == "target")
            counters = tuple(sorted(target["counters"].items()))
            stands, seen["counters"] = seen.get("counters") == counters, counters
            time.sleep(0.6)  # longer than a heartbeat
            return stands

        seen = {}
        wait_until(paused, "the target to stand still", 30)
        assert quick.status()["requests"] == {"running": 1, "queued": 0}
        done = quick.generate("import sys\n", max_tokens=64, ignore_eos=True)
        assert done.n_tokens == 64
        for _ in events:
            pass
        assert stream.completion.n_tokens == 900
