"""Every message of the system: one frozen dataclass each, with sender, receiver, when and answer.

Owns names and fields. Does not know bytes (`codec`), sockets (`common.net`) or who may send what
(`roles`). `PROTOCOL.md` is the same list for people who write a peer in another language.

Planes: *control* is the star around the coordinator; *data* is the direct link drafter <-> target.
Identity: everything that belongs to a round carries a `RoundKey`; whatever does not match the
receiver's present round is dropped and counted, never an exception.

Field types are limited to what the codec's table knows: bool, int, float, str, bytes, tuples of
these, `str -> value` maps one level deep (`dict[str, Scalar]`), `None` where a default says so,
another message-part dataclass (`RoundKey`, `Sampling`, `ModelCard`), and `Tensor` (its own frame).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from common.wire.tensors import Tensor

Scalar = bool | int | float | str

MAX_SESSION_CHARS: Final = 64
MAX_DRAFTS: Final = 15  # a verify has at most 16 rows: the anchor and 15 drafts


# --------------------------------------------------------------------------- parts of messages


@dataclass(frozen=True, slots=True)
class RoundKey:
    """Names one round of one session; equal on every message of that round."""

    session: str  # the coordinator's name for one request at its workers
    epoch: int  # rises when the history is re-based (new target)
    round_index: int  # counts rounds of the session from 0
    base: int  # absolute position of the anchor, prompt starts at 0
    anchor_id: int  # the last committed token, not yet forwarded by the target
    draft_id: int  # new for every Draft; 0 where no draft was asked for


@dataclass(frozen=True, slots=True)
class Sampling:
    """What the client asked for, already validated by `common.sampling`; honoured or refused."""

    max_tokens: int = 256
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    seed: int = 0
    acceptance: str = "exact"
    ignore_eos: bool = False
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # 1: off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias_ids: tuple[int, ...] = ()  # token ids whose scores are raised or lowered ..
    bias_values: tuple[float, ...] = ()  # .. by so much, one each
    stop_ids: tuple[int, ...] = ()  # end the text beside the model's own end-of-text tokens
    stop: tuple[str, ...] = ()  # texts that end the reply; not part of it
    logprobs: int = -1  # -1: none; n >= 0: of the chosen token and of the n most likely ones
    typical_delta: float = 0.2
    typical_epsilon: float = 1.0
    cascade_alpha: float = 0.95


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Fingerprints compared before a drafter is paired with a target; empty string: not held."""

    model_type: str
    vocab_size: int
    hidden_size: int  # width of one feature row: the drafter's
    context_len: int  # most tokens a session may hold
    block_size: int  # B: anchor plus drafts of one drafter call; 0 when no drafter is bound
    window: int  # W: how far back the drafter sees; 0 is unlimited
    tap_layer_ids: tuple[int, ...]
    tap_contraction: str
    fc_hash: str
    norm_hash: str
    embedding_hash: str
    head_hash: str
    tokenizer_hash: str


# --------------------------------------------------------------------------- joining and leaving


@dataclass(frozen=True, slots=True)
class Hello:
    """Any peer -> coordinator, first on every connection. Answer: Welcome or Reject."""

    role: str  # "target" | "drafter" | "client" | "admin"
    name: str  # "target.1"; free text for clients
    major: int
    minor: int
    build: str  # package version, for people
    pid: int
    card: ModelCard | None = None  # workers only


@dataclass(frozen=True, slots=True)
class Welcome:
    """Coordinator -> peer: registered; a connection that comes back needs a new Hello."""

    nonce: str
    heartbeat_ms: int


@dataclass(frozen=True, slots=True)
class Reject:
    """Coordinator -> peer: not registered. The sentence names both sides."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Worker -> coordinator while starting: phase and share done, for the start-up view."""

    phase: str  # "load" | "warm-up" | "self-check"
    done: float  # 0.0..1.0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """Worker -> coordinator: may be given work."""

    capacity: int  # sessions at once
    ladder_ms: tuple[float, ...] = ()  # target: measured verify ms for rows 1, 2, ..
    data_endpoint: str = ""  # target: where drafters connect
    data_public_key: str = ""  # target: CURVE key of the data socket, Z85; empty on ipc
    device: str = ""  # "cpu", "metal", "cuda", for `ps`
    notes: Mapping[str, Scalar] = field(default_factory=dict)  # blas, threads: for `ps` and `bench`


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Both ways on the control link, every `heartbeat_ms`; any inbound traffic counts as alive."""

    state: str  # "starting" | "ready" | "busy" | "draining"
    sessions: int
    progress_age_ms: float  # since the compute thread last finished a piece of work or was idle
    rss_bytes: int
    counters: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bye:
    """Either side, last on a connection."""

    reason: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Admin -> coordinator -> worker: finish what runs, take nothing new. Answer: Drained."""

    name: str  # worker name


@dataclass(frozen=True, slots=True)
class Drained:
    """Coordinator -> admin: the named worker holds no session and was told Bye."""

    name: str


# --------------------------------------------------------------------------- client requests


@dataclass(frozen=True, slots=True)
class Submit:
    """Client -> coordinator: one request. Answers: Accepted, Tokens.., Done; or Failed."""

    request: str  # the client's own id, unique on its connection
    prompt: Tensor  # uint8 [bytes]: UTF-8 text; int32 [N]: token ids
    sampling: Sampling
    draft: bool = True  # False: no taps, no features, nothing drafted
    deadline_ms: int = 0  # from arrival; 0: none
    is_chat: bool = False  # the text is a JSON object of messages, rendered by the chat template
    allow_special: bool = False  # special tokens written out in the text become those tokens
    claim: str = ""  # secret name of the request: who shows it again resumes instead of repeating
    from_index: int = 0  # with a claim: the first token index wanted
    window: int = 0  # most tokens sent and not yet told by Read; 0: no limit
    share_scope: str = ""  # of those the client acts for: whose prompts may share prefixes


@dataclass(frozen=True, slots=True)
class Accepted:
    """Coordinator -> client: admitted or queued; `seed` is the one in force."""

    request: str
    seed: int
    queued_behind: int


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """Target -> coordinator (`name` is the session) -> client (`name` is the request)."""

    name: str
    done: int  # prompt tokens forwarded
    total: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """Coordinator -> client: newly committed tokens; indices are contiguous from 0."""

    request: str
    index: int  # index of ids[0] among the generated tokens
    ids: tuple[int, ...]
    pieces: tuple[str, ...]  # one text piece per id; may be "" while a character is incomplete
    n_accepted: int  # the first n_accepted ids were drafts; the rest is the target's own
    logprobs: tuple[float, ...] = ()  # one per id where asked for: nats, of the chosen token
    top_ids: tuple[int, ...] = ()  # the most likely ids, `Sampling.logprobs` of them per id
    top_logprobs: tuple[float, ...] = ()  # one per top id


@dataclass(frozen=True, slots=True)
class Done:
    """Coordinator -> client: the request is complete."""

    request: str
    finish_reason: str  # "stop" | "length"
    tail: str  # text that the detokenizer still held back
    stats: str  # JSON object, design 7's `stats`
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Coordinator -> client, or worker -> coordinator (`name` is the session): a typed error."""

    name: str
    code: str  # a code of common.errors
    message: str
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Cancel:
    """Client -> coordinator: stop within one round. Answer: Failed(code="cancelled")."""

    request: str


@dataclass(frozen=True, slots=True)
class Read:
    """Client -> coordinator: every token below `index` was taken; needed with `Submit.window`."""

    request: str
    index: int


# --------------------------------------------------------------------------- sessions at workers


@dataclass(frozen=True, slots=True)
class Open:
    """Coordinator -> target: start a session. Answers: Opened, PrefillProgress.., Prefilled."""

    session: str
    epoch: int
    ticket: str  # what the drafter must show on the data link; "" when nothing will be drafted
    prompt: Tensor  # as in Submit; on a replay int32 ids: prompt plus committed
    n_replayed: int  # of these ids, how many at the end were already sent to the client
    sampling: Sampling
    taps: bool  # False: no taps are computed, no features sent
    is_chat: bool = False  # as in Submit
    allow_special: bool = False  # as in Submit
    share_scope: str = (
        ""  # key and scope that asked: only prefixes of the same one may be gone on from
    )


@dataclass(frozen=True, slots=True)
class Opened:
    """Target -> coordinator: the prompt's ids (the coordinator keeps the committed ids)."""

    session: str
    epoch: int
    prompt_ids: Tensor  # int32 [N]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Target -> coordinator: the token that prefill chose; it reaches the client at once.

    With finish "stop" the chosen token ended the text: it is not emitted and `piece` is empty.
    """

    session: str
    epoch: int
    anchor_id: int
    base: int  # its position: the number of tokens the target has forwarded
    piece: str
    finish: str  # "" | "stop" | "length"
    tail: str
    near_ties: int
    ms: float
    logprobs: tuple[float, ...] = ()  # as in Tokens, of the anchor
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    ngram_hits: int = 0  # n-gram rows of the prompt that the row cache held
    ngram_misses: int = 0  # .. and those that were read
    cached_tokens: int = 0  # of the prompt, that an earlier session left behind


@dataclass(frozen=True, slots=True)
class Attach:
    """Coordinator -> drafter: open a session and link to this target for its features."""

    session: str
    epoch: int
    ticket: str
    endpoint: str
    server_key: str  # CURVE public key of the target's data socket, Z85; "" on ipc


@dataclass(frozen=True, slots=True)
class Renew:
    """Coordinator -> target: a new ticket for the session; links with the old one are dropped."""

    session: str
    ticket: str


@dataclass(frozen=True, slots=True)
class LinkLost:
    """Drafter or target -> coordinator: the data link of a session is gone or was refused."""

    session: str
    ticket: str
    reason: str


@dataclass(frozen=True, slots=True)
class Close:
    """Coordinator -> worker: free everything of the session. Idempotent, no answer."""

    session: str


# --------------------------------------------------------------------------- rounds


@dataclass(frozen=True, slots=True)
class Draft:
    """Coordinator -> drafter: propose drafts for one round. Answer: Drafted or DraftFailed."""

    key: RoundKey
    n_drafts: int  # 1..B-1
    deadline_ms: float  # from arrival: how long to wait for the context to end at key.base
    temperature: float = 0.0  # above 0: draw the drafts from the drafter's own distribution, ..
    seed: int = 0  # .. keyed by this seed and their positions, and say what it was in the Block


@dataclass(frozen=True, slots=True)
class Drafted:
    """Drafter -> coordinator: the block is on its way to the target."""

    key: RoundKey
    confidences: tuple[float, ...]  # one per draft, 0..1
    ms: float  # the drafter's own time for this draft


@dataclass(frozen=True, slots=True)
class DraftFailed:
    """Drafter -> coordinator: no block this round."""

    key: RoundKey
    reason: str  # "no_context" | "unknown_session" | "stale" | "late" | "fault"


@dataclass(frozen=True, slots=True)
class Verify:
    """Coordinator -> target: run one round. rows=1 and draft_id=0 is a plain round."""

    key: RoundKey
    rows: int  # 1..16: the anchor and rows-1 drafts
    block_deadline_ms: float  # from arrival: how long to wait for block key.draft_id
    copy_ids: tuple[int, ...] = ()  # drafts copied from the committed ids by the coordinator


@dataclass(frozen=True, slots=True)
class Verified:
    """Target -> coordinator: the verdict; a repeated Verify gets the stored one again."""

    key: RoundKey
    rows_run: int  # 1 when the block did not come in time
    n_accepted: int  # 0..rows_run-1
    ids: tuple[int, ...]  # accepted drafts and the bonus; cut before a stop token and at max_tokens
    pieces: tuple[str, ...]  # one text piece per id
    finish: str  # "" | "stop" | "length"
    tail: str
    near_ties: int
    ms: float  # the target's own time for this verify
    wait_ms: float  # of it spent waiting for the block (not in ms)
    logprobs: tuple[float, ...] = ()  # as in Tokens
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    build: str = ""  # how the forward was built, such as "pipelined/4 deferred prebuilt"
    first_ms: float = 0.0  # of ms, the host's until the device had its first layers
    ngram_hits: int = 0  # n-gram rows since the last answer that the row cache held
    ngram_misses: int = 0  # .. and those that were read
    certainty: float = 1.0  # share of the target's best token where it chose the last id, 0..1


# --------------------------------------------------------------------------- data link


@dataclass(frozen=True, slots=True)
class Link:
    """Drafter -> target, first on a data link: which session, and how far its context reaches."""

    session: str
    epoch: int
    ticket: str
    have_pos: int  # absolute position of the next feature row wanted


@dataclass(frozen=True, slots=True)
class LinkRefused:
    """Target -> drafter: unknown ticket or session."""

    session: str
    ticket: str
    reason: str


@dataclass(frozen=True, slots=True)
class Features:
    """Target -> drafter: context features of committed positions, in order, without gaps."""

    session: str
    epoch: int
    first_pos: int
    rows: Tensor  # bfloat16 or float32 [S, H]


@dataclass(frozen=True, slots=True)
class Resync:
    """Drafter -> target: send the feature rows again from this position."""

    session: str
    epoch: int
    from_pos: int


@dataclass(frozen=True, slots=True)
class Block:
    """Drafter -> target: the draft ids of one round."""

    key: RoundKey
    ids: tuple[int, ...]
    confidences: tuple[float, ...]
    q_ids: tuple[int, ...] = ()  # of drawn drafts: the candidates of each, as many for every one ..
    q_probs: tuple[float, ...] = ()  # .. and the probabilities they were drawn with


# --------------------------------------------------------------------------- operating


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """Client or admin -> coordinator. Answer: Status."""

    request: str


@dataclass(frozen=True, slots=True)
class Status:
    """Coordinator -> client or admin."""

    request: str
    body: str  # JSON object: state, workers, requests, counters


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """Launcher (admin) -> coordinator: a process it watches is gone; faster than any heartbeat."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Order:
    """Command line -> launcher, on the launcher's own socket. Answer: Report."""

    request: str
    verb: str  # "ps" | "scale" | "restart" | "drain" | "down"
    arguments: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """Launcher -> command line."""

    request: str
    ok: bool
    code: str  # "" or a code of common.errors
    body: str  # JSON object, or the sentence of the error


Message = (
    Hello
    | Welcome
    | Reject
    | Progress
    | Ready
    | Heartbeat
    | Bye
    | Drain
    | Drained
    | Submit
    | Accepted
    | PrefillProgress
    | Tokens
    | Done
    | Failed
    | Cancel
    | Read
    | Open
    | Opened
    | Prefilled
    | Attach
    | Renew
    | LinkLost
    | Close
    | Draft
    | Drafted
    | DraftFailed
    | Verify
    | Verified
    | Link
    | LinkRefused
    | Features
    | Resync
    | Block
    | StatusRequest
    | Status
    | WorkerExited
    | Order
    | Report
)

TYPE_NUMBERS: Final[dict[type[Message], int]] = {
    Hello: 1,
    Welcome: 2,
    Reject: 3,
    Progress: 4,
    Ready: 5,
    Heartbeat: 6,
    Bye: 7,
    Drain: 8,
    Drained: 9,
    Submit: 20,
    Accepted: 21,
    PrefillProgress: 22,
    Tokens: 23,
    Done: 24,
    Failed: 25,
    Cancel: 26,
    Read: 27,
    Open: 40,
    Opened: 41,
    Prefilled: 42,
    Attach: 43,
    Renew: 44,
    LinkLost: 45,
    Close: 46,
    Draft: 60,
    Drafted: 61,
    DraftFailed: 62,
    Verify: 63,
    Verified: 64,
    Link: 80,
    LinkRefused: 81,
    Features: 82,
    Resync: 83,
    Block: 84,
    StatusRequest: 100,
    Status: 101,
    WorkerExited: 102,
    Order: 103,
    Report: 104,
}
