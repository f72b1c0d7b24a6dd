"""A coordinator, scripted workers and clients on one mesh: the stage of our tests."""

import itertools

from support.scripted import ScriptedClient, ScriptedDrafter, ScriptedTarget

from common.coordinator.hub import Coordinator
from common.net.inproc import Mesh
from common.net.mesh_shell import MeshShell
from common.settings import CoordinatorConfig, PolicyConfig

LADDER_MS = tuple(10.0 * (1 + 0.1 * row) for row in range(16))  # what scripted verifies take


class World:
    """Everything on one mesh; time is virtual.

    Args:
        seed: of the mesh.
        mode: of the policy.
        copies: whether targets say that earlier text may be copied.
        config: changes to the coordinator's configuration.
    """

    def __init__(self, seed=0, *, mode="fixed", copies=False, **config):
        self.mesh = Mesh(seed)
        self.targets, self.drafters, self.clients = {}, {}, {}
        self._starts = itertools.count()
        words = itertools.count()
        self.hub = Coordinator(
            CoordinatorConfig(**config), PolicyConfig(mode), lambda: f"word-{next(words)}"
        )
        self._notes = {"copies": copies}
        self.mesh.add(
            "coordinator",
            on_message=lambda peer, message, now: self._send(self.hub.handle(peer, message, now)),
            on_lost=lambda peer, now: self._send(self.hub.lost(peer, now)),
            next_deadline=self.hub.next_deadline,
            on_time=lambda now: self._send(self.hub.tick(now)),
        )

    def _send(self, outgoing):
        waiting = list(outgoing)
        while waiting:
            peer, message = waiting.pop(0)
            if not self.mesh.send("coordinator", peer, message):
                waiting += self.hub.lost(peer, self.mesh.now)

    def target(self, name="target.1", **changes):
        """Start a target."""
        endpoint = f"data-{name}-{next(self._starts)}"
        shell = MeshShell(self.mesh, name, data_endpoint=endpoint)
        notes = {**self._notes, **changes.pop("notes", {})}
        changes = {"ladder_ms": LADDER_MS, "notes": notes, **changes}
        target = ScriptedTarget(shell, name, endpoint=endpoint, **changes)
        target.start(self.mesh.now)
        self.targets.setdefault(name, []).append(target)
        return target

    def drafter(self, name="drafter.1", **changes):
        """Start a drafter."""
        drafter = ScriptedDrafter(MeshShell(self.mesh, name), name, **changes)
        drafter.start(self.mesh.now)
        self.drafters.setdefault(name, []).append(drafter)
        return drafter

    def client(self, name="client"):
        """Connect a client."""
        self.clients[name] = ScriptedClient(self.mesh, name)
        return self.clients[name]

    def settle(self, seconds=0.05):
        """Let registrations go through."""
        self.mesh.run(limit_s=seconds)

    def finish(self, limit_s=120.0):
        """Run until every client has every end."""
        done = self.mesh.run(lambda: all(c.is_done for c in self.clients.values()), limit_s=limit_s)
        assert done, {name: set(c.replies) - set(c.ends) for name, c in self.clients.items()}

    def verdicts(self):
        """(rows asked for, rows run, accepted) of every round at every target."""
        lives = itertools.chain.from_iterable(self.targets.values())
        return [verdict for target in lives for verdict in target.verdicts]

    def is_idle(self):
        """Nothing is held anywhere in the coordinator."""
        hub = self.hub
        return not len(hub.requests) and not any(worker.sessions for worker in hub.registry)
