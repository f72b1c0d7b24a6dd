"""Who reads which reply, under what name, and which replies are kept for a client that comes back.

Owns deliveries: their names, their claims, and how long and how much is kept after a request's
end. Does not know machines or workers; `post` takes what goes out. Times are passed in.
Invariant: a reply has one reader at a time; what is kept of ended requests is bounded in number,
in size and in time.
"""

from collections import OrderedDict
from dataclasses import replace
from hashlib import blake2b
from typing import Final

from common.coordinator.delivery import Delivery
from common.coordinator.events import Post, ToReader
from common.errors import BadRequest, Cancelled, SlowReader, UnknownClaim
from common.wire.messages import Accepted, Failed, Submit
from common.wire.tensors import Tensor

MAX_ENDED: Final = 256  # replies kept after their end; the oldest goes first
MAX_ENDED_VALUES: Final = 1_000_000  # numbers and texts of all of them together: about 50 MB
_NOTHING: Final = Tensor("uint8", (0,), b"")


class Readers:
    """All deliveries of the coordinator.

    Args:
        keep_s: how long a reply with a claim is kept without its client, or after its end.
        post: takes a message for a peer.
    """

    def __init__(self, keep_s: float, post: Post) -> None:
        self._keep_s = keep_s
        self._post = post
        self._by_name: dict[tuple[str, str], Delivery] = {}
        self._by_owner: dict[tuple[str, str], Delivery] = {}
        self._ended: OrderedDict[int, Delivery] = OrderedDict()  # by number; first to go first

    def __len__(self) -> int:
        """Replies that are kept after their end."""
        return len(self._ended)

    def find(self, client: str, name: str) -> Delivery | None:
        """What a client reads under this name."""
        return self._by_name.get((client, name))

    def of(self, client: str) -> list[Delivery]:
        """Everything that a client reads."""
        return [delivery for delivery in self._by_name.values() if delivery.client == client]

    def claimed(self, key: str, message: Submit) -> Delivery | None:
        """The delivery that a Submit means to resume; None: it is a new request.

        Args:
            key: whose key the client shows; "" where links have none.
            message: as it came.

        Raises:
            BadRequest: an index without a claim or beyond the reply, or another request's claim.
            UnknownClaim: a claim that this key has not, or no longer.
        """
        claim, index = message.claim, message.from_index
        if not claim and index:
            raise BadRequest(f"from_index: {index} without a claim; only a claim can be resumed")
        delivery = self._by_owner.get((key, claim))
        if delivery is None:
            if index:
                raise UnknownClaim(
                    f"claim {claim!r}: no request of this client goes by it, or its reply is no "
                    "longer kept; send the request again, without from_index"
                )
            return None
        if _digest(message) != delivery.digest:
            raise BadRequest(
                f"claim {claim!r}: it belongs to a request with another prompt or other "
                "parameters; a request that resumes must be the same one"
            )
        if index > delivery.n_tokens:
            raise BadRequest(
                f"from_index: {index}; the request with claim {claim!r} has "
                f"{delivery.n_tokens} tokens so far"
            )
        return delivery

    def new(self, number: int, client: str, key: str, message: Submit) -> Delivery:
        """The delivery of a new request, to the client that sent it; `enter` makes it count."""
        is_kept = bool(message.claim) and self._keep_s > 0
        owner = (key, message.claim) if is_kept else None
        delivery = Delivery(number, client, message.request, message.window, owner)
        delivery.seed = message.sampling.seed
        if owner is not None:
            delivery.digest = _digest(message)
        return delivery

    def enter(self, delivery: Delivery) -> None:
        """A request that was let in."""
        self._by_name[delivery.client, delivery.name] = delivery
        if delivery.owner is not None:
            self._by_owner[delivery.owner] = delivery

    def take(self, delivery: Delivery, message: ToReader) -> None:
        """Pass on what a request says to its client."""
        self._send(delivery, delivery.take(message))

    def read(self, delivery: Delivery, index: int, now: float) -> None:
        """A client took every token below `index`."""
        self._send(delivery, delivery.read(index))
        if delivery.number in self._ended:
            self._keep(delivery, now)

    def resume(
        self, delivery: Delivery, client: str, message: Submit, n_before: int, now: float
    ) -> None:
        """A client comes back, or another one with the same key and claim takes over."""
        if delivery.client:
            text = f"request {delivery.name}: resumed on another connection with the same claim"
            self._post(delivery.client, Failed(delivery.name, Cancelled.code, text))
        self.leave(delivery)
        delivery.attach(client, message.request, message.window, message.from_index)
        self._by_name[client, message.request] = delivery
        if delivery.number in self._ended:
            self._keep(delivery, now)
        self._post(client, Accepted(message.request, delivery.seed, n_before))
        self._send(delivery, delivery.resend())

    def leave(self, delivery: Delivery, now: float | None = None) -> None:
        """Nobody reads it; with a time: it is given up when nobody has come for so long."""
        self._by_name.pop((delivery.client, delivery.name), None)
        delivery.leave()
        if now is not None and delivery.number not in self._ended:
            delivery.leaves_at = now + self._keep_s

    def cancel(self, delivery: Delivery) -> None:
        """The client wants no more of a reply whose request has ended."""
        text = f"request {delivery.name}: cancelled"
        self._post(delivery.client, Failed(delivery.name, Cancelled.code, text))
        self.leave(delivery)

    def end(self, delivery: Delivery, now: float) -> None:
        """The request is over: keep its reply for a while, if it has a claim."""
        if delivery.owner is None:
            self._by_name.pop((delivery.client, delivery.name), None)
            return
        self._keep(delivery, now)
        self._free_name(delivery)
        n_values = sum(one.n_values for one in self._ended.values())
        while len(self._ended) > MAX_ENDED or n_values > MAX_ENDED_VALUES:
            n_values -= self._drop_first()

    # ------------------------------------------------------------------ time

    def next_deadline(self) -> float | None:
        """When `on_time` is wanted, in monotonic seconds."""
        return next((one.leaves_at for one in self._ended.values()), None)

    def on_time(self, now: float) -> None:
        """Forget replies that were kept long enough."""
        while (due := self.next_deadline()) is not None and due <= now:
            self._drop_first()

    def _keep(self, delivery: Delivery, now: float) -> None:
        delivery.leaves_at = now + self._keep_s
        self._ended[delivery.number] = delivery
        self._ended.move_to_end(delivery.number)

    def _drop_first(self) -> int:
        _, delivery = self._ended.popitem(last=False)
        if delivery.client and not delivery.is_whole:
            text = f"request {delivery.name}: its reply was not read on and is no longer kept"
            self._post(delivery.client, Failed(delivery.name, SlowReader.code, text))
        self._by_name.pop((delivery.client, delivery.name), None)
        if delivery.owner is not None:
            self._by_owner.pop(delivery.owner, None)
        return delivery.n_values

    def _send(self, delivery: Delivery, messages: list[ToReader]) -> None:
        for message in messages:
            self._post(delivery.client, message)
        if delivery.number in self._ended:
            self._free_name(delivery)

    def _free_name(self, delivery: Delivery) -> None:
        """A name may be used again once its reply is whole, though that is still kept."""
        if delivery.is_whole:
            self._by_name.pop((delivery.client, delivery.name), None)
            delivery.leave()


def _digest(message: Submit) -> bytes:
    """What must be the same for a Submit to be the same request."""
    told = replace(
        message, request="", prompt=_NOTHING, deadline_ms=0, claim="", from_index=0, window=0
    )
    prompt = message.prompt
    body = blake2b(f"{told!r} {prompt.dtype} {prompt.shape}".encode(), digest_size=16)
    body.update(prompt.data)
    return body.digest()
