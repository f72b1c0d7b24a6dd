"""What a request's machine sends: Open to a target, Tokens to the client.

Owns how the two are filled in. Pure; does not know phases or when they are sent.
"""

from collections.abc import Sequence

from common.coordinator.attachment import Attachment
from common.coordinator.events import Request
from common.wire.messages import Open, Prefilled, Tokens, Verified
from common.wire.tensors import from_ids


def open_message(
    request: Request,
    session: str,
    epoch: int,
    tie: Attachment,
    prompt_ids: Sequence[int] | None,
    committed: Sequence[int],
) -> Open:
    """Start a session; where the prompt's ids are known, with them and what was committed."""
    is_replay = prompt_ids is not None
    return Open(
        session=session,
        epoch=epoch,
        ticket=tie.ticket,
        prompt=request.prompt if prompt_ids is None else from_ids([*prompt_ids, *committed]),
        n_replayed=len(committed),
        sampling=request.sampling,
        taps=tie.has_taps,
        is_chat=request.is_chat and not is_replay,
        allow_special=request.allow_special and not is_replay,
        share_scope=request.owner,
    )


def first_token(event: Prefilled, name: str, index: int) -> Tokens:
    """The token that prefill chose; none where it ended the text and brought no text with it."""
    is_shown = event.finish != "stop" or bool(event.piece)
    ids, pieces = ((event.anchor_id,), (event.piece,)) if is_shown else ((), ())
    shares = event.logprobs, event.top_ids, event.top_logprobs
    return Tokens(name, index, ids, pieces, 0, *shares)


def round_tokens(event: Verified, name: str, index: int) -> Tokens:
    """What a round committed."""
    n_accepted = min(event.n_accepted, len(event.ids))
    shares = event.logprobs, event.top_ids, event.top_logprobs
    return Tokens(name, index, event.ids, event.pieces, n_accepted, *shares)
