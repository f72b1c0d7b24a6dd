"""The in-process mesh is deterministic, and its faults are what they say."""

from common.net.inproc import LOST_AFTER_S, Faults, Mesh
from common.net.mesh_shell import MeshShell
from common.net.transport import DATA_LINK, Peer
from common.wire.messages import Bye, Close, Link, LinkRefused


class Recorder:
    """An actor that writes down what happens to it."""

    def __init__(self):
        self.seen, self.lost, self.pieces, self.deadline = [], [], 0, None

    def on_message(self, peer, message, now):
        self.seen.append((peer, message, now))

    def on_lost(self, peer, now):
        self.lost.append((peer, now))

    def work(self, now):
        self.pieces -= self.pieces > 0
        return self.pieces > 0

    def next_deadline(self):
        return self.deadline

    def on_time(self, now):
        self.deadline = None
        self.seen.append(("time", now))

    def heartbeat(self):
        return "ready", 0, {}


def pair(seed=0, faults=None):
    mesh, seen = Mesh(seed), []
    mesh.add("a", on_message=lambda *_: None)
    mesh.add("b", on_message=lambda sender, message, now: seen.append((message.session, now)))
    if faults:
        mesh.fault("a", "b", faults)
    return mesh, seen


def scrambled(seed):
    mesh, seen = pair(seed, Faults(0.2, 0.2, 0.3, (0.001, 0.01)))
    for index in range(200):
        mesh.send("a", "b", Close(str(index)))
    mesh.run()
    return seen, mesh.counts


def test_equal_seeds_give_equal_runs():
    """A failing schedule that cannot be repeated cannot be debugged."""
    first, counts = scrambled(7)
    assert first == scrambled(7)[0]
    assert first != scrambled(8)[0]
    assert min(counts.dropped, counts.duplicated, counts.reordered) > 0


def test_without_faults_everything_arrives_once_and_in_order():
    """Random delays must not reorder one connection: real links are FIFO."""
    mesh, seen = pair(3, Faults(delay_s=(0.0, 1.0)))
    for index in range(100):
        assert mesh.send("a", "b", Close(str(index)))
    mesh.run(limit_s=1000)
    assert [name for name, _ in seen] == [str(index) for index in range(100)]


def test_kill_is_told_after_what_was_on_its_way():
    """A loss that overtakes the last messages would hide them from every test."""
    mesh, heard = Mesh(), []
    mesh.add("a", on_message=lambda *_: None)
    mesh.add(
        "b",
        on_message=lambda *_: heard.append("message"),
        on_lost=lambda name, now: heard.append(("lost", name, now)),
    )
    mesh.fault("a", "b", Faults(delay_s=(0.5, 0.5)))
    mesh.send("a", "b", Close("s"))
    mesh.kill("a")
    mesh.run()
    assert heard == ["message", ("lost", "a", 0.5)]
    assert not mesh.send("b", "a", Close("s"))


def test_partition_is_silent_until_healed():
    """A partition that told anybody would not be one."""
    mesh, seen = pair()
    mesh.partition("a", "b")
    assert mesh.send("a", "b", Close("1"))
    mesh.heal("a", "b")
    mesh.send("a", "b", Close("2"))
    mesh.run()
    assert [name for name, _ in seen] == ["2"]


def test_stalled_process_catches_up_when_resumed():
    """SIGSTOP keeps the messages; it must not lose them."""
    mesh, seen = pair()
    mesh.stall("b")
    mesh.send("a", "b", Close("1"))
    assert not mesh.run(lambda: bool(seen), limit_s=5.0)
    mesh.resume("b")
    assert mesh.run(lambda: bool(seen))


def linked():
    mesh, target, drafter = Mesh(), Recorder(), Recorder()
    mesh.add("coordinator", on_message=lambda *_: None)
    shell = MeshShell(mesh, "target.1", data_endpoint="ipc://data-target.1.sock")
    shell.start(target)
    other = MeshShell(mesh, "drafter.1")
    other.start(drafter)
    peer = other.dial("ipc://data-target.1.sock", "")
    other.send(peer, Link("s", 0, "ticket", 0))
    mesh.run(lambda: bool(target.seen))
    return mesh, target, drafter, shell, other, peer


def test_data_link_carries_both_ways():
    """Features go back on the link that the drafter opened."""
    mesh, target, drafter, shell, _, peer = linked()
    origin = target.seen[0][0]
    assert origin.link == DATA_LINK
    assert shell.send(origin, LinkRefused("s", "ticket", "unknown"))
    mesh.run(lambda: bool(drafter.seen))
    assert drafter.seen[0][0] == peer


def test_killed_drafter_is_lost_on_the_data_link():
    """A target that is not told keeps feeding a dead drafter."""
    mesh, target, _, shell, _, _ = linked()
    origin, killed_at = target.seen[0][0], mesh.now
    mesh.kill("drafter.1")
    mesh.run()
    assert target.lost == [(origin, killed_at + LOST_AFTER_S)]
    assert not shell.send(origin, Bye(""))


def test_dialling_a_dead_endpoint_is_a_loss():
    """A drafter told to attach to a target that just died must find out."""
    mesh, drafter = Mesh(), Recorder()
    mesh.add("coordinator", on_message=lambda *_: None)
    shell = MeshShell(mesh, "drafter.1")
    shell.start(drafter)
    shell.dial("ipc://gone", "")
    mesh.run()
    assert [peer for peer, _ in drafter.lost] == [Peer("ipc://gone")]


def test_deadlines_and_work_are_driven():
    """An actor that is never called on time hangs in the mesh but not in life."""
    mesh, actor = Mesh(), Recorder()
    mesh.add("coordinator", on_message=lambda *_: None)
    actor.deadline, actor.pieces = 2.5, 4
    MeshShell(mesh, "target.1").start(actor)
    mesh.run()
    assert actor.seen == [("time", 2.5)]
    assert actor.pieces == 0
