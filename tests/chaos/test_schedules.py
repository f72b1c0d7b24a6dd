"""Hundreds of seeded schedules of faults: the output is the plain one, whatever happens.

Every schedule is a world of its own on the in-process mesh, under a virtual clock. A failing seed
fails again.
"""

import random

import pytest
from support.scripted import MODES, RIGHT, plain_reply
from support.world import World

from common.net.inproc import Faults
from common.wire.messages import Done, Failed

N_SEEDS = 200
GROUPS = 20  # a test each, so that a failure names few seeds


def faults(rng):
    """A lossy, jittery, doubling, reordering direction."""
    return Faults(
        drop=rng.choice([0.0, 0.02, 0.1]),
        duplicate=rng.choice([0.0, 0.1]),
        reorder=rng.choice([0.0, 0.2]),
        delay_s=(0.0001, rng.choice([0.0002, 0.003])),
    )


def trouble_links(world, rng, names):
    """Faults on every link between workers and the coordinator, and among workers."""
    for name in names:
        world.mesh.fault("coordinator", name, faults(rng))
        world.mesh.fault(name, "coordinator", faults(rng))
        for other in names:
            world.mesh.fault(name, other, faults(rng))


def kill_and_restart(world, rng, name, start):
    """End a process at some moment, and start it again a little later."""

    def end():
        world.mesh.kill(name)
        world.mesh.at(rng.uniform(0.01, 0.5), start)

    world.mesh.at(rng.uniform(0.05, 1.5), end)


def cut_off(world, rng, name, other):
    """Part two processes for a while."""
    world.mesh.at(rng.uniform(0.05, 1.0), lambda: world.mesh.partition(name, other))
    world.mesh.at(rng.uniform(1.0, 4.0), lambda: world.mesh.heal(name, other))


def build(seed):
    """A world full of trouble, and the requests that run in it."""
    rng = random.Random(seed)
    world = World(seed, mode=rng.choice(["fixed", "fixed", "adaptive"]))
    n_targets, n_drafters = rng.choice([1, 2]), rng.choice([1, 2])
    for index in range(1, n_targets + 1):
        world.target(f"target.{index}", capacity=rng.choice([2, 8]))
    for index in range(1, n_drafters + 1):
        name = f"drafter.{index}"
        modes = [RIGHT, *rng.choices(MODES, k=4)]
        world.drafter(name, modes=modes)
        if rng.random() < 0.4:
            start = lambda name=name, modes=modes: world.drafter(name, modes=modes)  # noqa: E731
            kill_and_restart(world, rng, name, start)
        elif rng.random() < 0.2:
            cut_off(world, rng, name, rng.choice(["coordinator", "target.1"]))
    if n_targets == 2 and rng.random() < 0.5:
        kill_and_restart(world, rng, "target.1", lambda: world.target("target.1"))
    world.settle()
    if rng.random() < 0.7:
        trouble_links(world, rng, [*world.targets, *world.drafters])
    requests = {}
    for client in ("alice", "bob"):
        link = world.client(client)
        for number in range(rng.choice([1, 2])):
            name = f"{client}-{number}"
            requests[client, name] = (rng.choices(range(1, 50), k=6), rng.choice([1, 17, 48]))
            prompt, n = requests[client, name]
            delay_s = rng.uniform(0, 0.3)
            submit = link.submit
            submit(name, prompt, n) if rng.random() < 0.5 else world.mesh.at(
                delay_s, lambda s=submit, a=name, p=prompt, m=n: s(a, p, m)
            )
            link.replies.setdefault(name, [])
    return world, requests


def judge(world, requests):
    """Each reply is the plain one; where no target was left, it is a beginning of the plain one."""
    n_whole = 0
    for (client, name), (prompt, max_tokens) in requests.items():
        link = world.clients[client]
        expected, reason = plain_reply(prompt, max_tokens)
        got, end = link.replies[name], link.ends[name]
        if isinstance(end, Failed):
            assert (end.code, len(world.targets) or 0) in {("peer_lost", 1), ("peer_lost", 2)}, end
            assert got == expected[: len(got)]
        else:
            assert isinstance(end, Done)
            assert (got, end.finish_reason) == (expected, reason)
            n_whole += 1
    return n_whole


@pytest.mark.parametrize("group", range(GROUPS))
def test_output_is_the_plain_one_under_every_schedule(group):
    """Losing, doubling, reordering or lying may cost time, never output."""
    n_requests = n_whole = n_drafted = n_rejected = n_full = n_faults = 0
    for seed in range(group, N_SEEDS, GROUPS):
        world, requests = build(seed)
        world.finish()
        world.mesh.fault_all(Faults())
        n_whole += judge(world, requests)
        n_requests += len(requests)
        assert world.is_idle(), seed
        verdicts = [(rows, n) for _, rows, n in world.verdicts() if rows > 1]
        n_drafted += len(verdicts)
        n_rejected += sum(n < rows - 1 for rows, n in verdicts)
        n_full += sum(n == rows - 1 for rows, n in verdicts)
        counts = world.mesh.counts
        n_faults += counts.dropped + counts.duplicated + counts.reordered
    assert n_whole >= 0.9 * n_requests
    assert min(n_drafted, n_rejected, n_full, n_faults) > 0
