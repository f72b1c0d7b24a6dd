"""The real target and the real drafter on the in-process mesh, under its virtual clock."""

from support.scripted import ScriptedWorker

from common.net.mesh_shell import MeshShell
from common.wire.messages import Ready
from drafter_svc.service import DrafterService
from target_svc.service import TargetService


class RealWorker(ScriptedWorker):
    """Says what a worker's shell says, and lets an actor do the rest.

    `spoil(message)` stands on the way out: it may change what is sent, or return None to lose it.
    `sent` holds what left.
    """

    def __init__(self, shell, name, card, make, ready):
        super().__init__(shell, name, card=card)
        self.spoil = lambda message: message
        self.sent = []
        self.service = make(self._send)
        self._ready = ready

    def of(self, kind):
        return [message for message in self.sent if isinstance(message, kind)]

    def ready(self):
        return self._ready

    def take(self, peer, message, now):
        self.service.on_message(peer, message, now)

    def on_lost(self, peer, now):
        self.service.on_lost(peer, now)

    def next_deadline(self):
        moments = [super().next_deadline(), self.service.next_deadline()]
        return min((moment for moment in moments if moment is not None), default=None)

    def on_time(self, now):
        super().on_time(now)
        self.service.on_time(now)

    def work(self, now):
        return self.service.work(now)

    def _send(self, peer, message):
        message = self.spoil(message)
        if message is None:
            return True
        self.sent.append(message)
        return self.shell.send(peer, message)


class RealTarget(RealWorker):
    """A target on a world's mesh."""

    role = "target"

    def __init__(self, world, engine, name="target.1", *, capacity=4):
        shell = MeshShell(world.mesh, name, data_endpoint=f"data-{name}")
        ladder = tuple(10.0 + row for row in range(engine.max_rows))
        super().__init__(
            shell,
            name,
            engine.card.wire,
            lambda send: TargetService(engine, send, capacity),
            Ready(capacity, ladder, f"data-{name}"),
        )
        self.start(world.mesh.now)


class RealDrafter(RealWorker):
    """A drafter on a world's mesh."""

    role = "drafter"

    def __init__(self, world, drafter, name="drafter.1", *, capacity=4):
        shell = MeshShell(world.mesh, name)
        super().__init__(
            shell,
            name,
            drafter.card,
            lambda send: DrafterService(drafter, send, shell.dial),
            Ready(capacity),
        )
        self.start(world.mesh.now)
