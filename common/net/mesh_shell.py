"""The shell of a worker on the in-process mesh; stands where `WorkerShell` stands on sockets.

Owns the translation between mesh nodes and an actor's peers. Does not know faults or time.
Unlike `WorkerShell` it does not say Hello or send heartbeats by itself: the test does, by `report`.
"""

from common.net.inproc import Mesh
from common.net.transport import CONTROL_LINK, CONTROL_PEER, DATA_LINK, Actor, Peer
from common.wire.messages import Message


class MeshShell:
    """Connections of one worker.

    Args:
        mesh: the network.
        name: the process, for faults and kills.
        control: the coordinator's node.
        data_endpoint: of a target: the node that drafters dial.
    """

    def __init__(
        self, mesh: Mesh, name: str, *, control: str = "coordinator", data_endpoint: str = ""
    ) -> None:
        self._mesh = mesh
        self._name = name
        self._control = control
        self._data_endpoint = data_endpoint
        self._dialled: dict[str, str] = {}  # endpoint -> own node on that link
        self._actor: Actor | None = None
        self.node = ""  # the routing id that the coordinator sees

    def start(self, actor: Actor) -> None:
        """Open the control connection, and the data endpoint of a target."""
        self._actor = actor
        self._open_control(actor)
        if self._data_endpoint:
            self._mesh.add(
                self._data_endpoint,
                on_message=lambda sender, message, now: actor.on_message(
                    Peer(DATA_LINK, sender.encode()), message, now
                ),
                on_lost=lambda sender, now: actor.on_lost(Peer(DATA_LINK, sender.encode()), now),
                owner=self._name,
            )

    def reconnect(self) -> None:
        """Come back to the coordinator under a new routing id, as after a lost connection."""
        if self._actor is None:
            raise RuntimeError("mesh shell: start(actor) before reconnect")
        self._mesh.remove(self.node)
        self._open_control(self._actor)

    def _open_control(self, actor: Actor) -> None:
        control = CONTROL_PEER
        self.node = f"{self._name}#{self._mesh.next_number()}"
        self._mesh.add(
            self.node,
            on_message=lambda _, message, now: actor.on_message(control, message, now),
            on_lost=lambda _, now: actor.on_lost(control, now),
            next_deadline=actor.next_deadline,
            on_time=actor.on_time,
            work=actor.work,
            owner=self._name,
        )
        self._mesh.connect(self.node, self._control)

    def send(self, peer: Peer, message: Message) -> bool:
        """Send as `Send` says."""
        if peer.link == CONTROL_LINK:
            return self._mesh.send(self.node, self._control, message)
        if peer.link == DATA_LINK:
            return self._mesh.send(self._data_endpoint, peer.id.decode(), message)
        node = self._dialled.get(peer.link)
        return node is not None and self._mesh.send(node, peer.link, message)

    def report(self, message: Message) -> bool:
        """Send to the coordinator: Hello, Progress, Ready."""
        return self.send(CONTROL_PEER, message)

    def dial(self, endpoint: str, server_key: str) -> Peer:
        """Open, or reuse, a data link; a dead endpoint shows as an immediate loss."""
        del server_key  # no encryption inside one process
        peer = Peer(endpoint)
        if endpoint in self._dialled:
            return peer
        actor = self._actor
        if actor is None:
            raise RuntimeError("mesh shell: start(actor) before dial")
        node = f"{self.node}/{self._mesh.next_number()}"
        self._dialled[endpoint] = node

        def lost(_sender: str, now: float) -> None:
            if self._dialled.get(endpoint) == node:
                self.hang_up(peer)
                actor.on_lost(peer, now)

        self._mesh.add(
            node,
            on_message=lambda _, message, now: actor.on_message(peer, message, now),
            on_lost=lost,
            owner=self._name,
        )
        if not self._mesh.connect(node, endpoint):
            self._mesh.at(0.0, lambda: lost(endpoint, self._mesh.now))
        return peer

    def hang_up(self, peer: Peer) -> None:
        """Close a data link; the target hears of it."""
        node = self._dialled.pop(peer.link, None)
        if node is not None:
            self._mesh.remove(node)
