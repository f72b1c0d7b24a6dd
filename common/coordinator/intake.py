"""From a Submit to a checked Request.

Owns what is refused before anything is done. Does not know queues or workers.
"""

from common.coordinator.events import Request
from common.errors import BadRequest
from common.sampling import SamplingParams
from common.wire.messages import Submit
from common.wire.tensors import to_ids, to_text


def request_of(message: Submit, number: int, client: str, now: float, key: str = "") -> Request:
    """Check a client's request.

    Args:
        message: as it came.
        number: the coordinator's own count.
        client: its peer.
        now: monotonic seconds.
        key: whose key sent it; "" where links have none.

    Raises:
        BadRequest: a parameter out of its range.
        BadTensor: the prompt is neither UTF-8 text nor token ids.
    """
    SamplingParams.of(message.sampling)
    if message.is_chat and message.prompt.dtype != "uint8":
        raise BadRequest("is_chat: the prompt is token ids; a chat is a JSON text")
    if message.prompt.dtype == "uint8":
        to_text(message.prompt)
    else:
        to_ids(message.prompt)
    return Request(
        number=number,
        client=client,
        name=message.request,
        prompt=message.prompt,
        is_chat=message.is_chat,
        allow_special=message.allow_special,
        owner=f"{key}#{message.share_scope}" if message.share_scope else key,
        sampling=message.sampling,
        draft=message.draft,
        submitted_at=now,
        expires_at=now + message.deadline_ms / 1e3 if message.deadline_ms else None,
    )
