"""Workers and clients without a model, for the in-process mesh: they answer from a rule.

The target's next id is a function of all ids so far. A feature row is the id at its position, so a
drafter that was fed whole can work out what comes next, and one that was fed wrongly cannot.
"""

import heapq
import itertools
import random
import zlib
from dataclasses import dataclass, field

import numpy as np

from common.net.transport import CONTROL_LINK, Peer
from common.wire.messages import (
    Accepted,
    Attach,
    Block,
    Bye,
    Cancel,
    Close,
    Done,
    Draft,
    Drafted,
    DraftFailed,
    Failed,
    Features,
    Heartbeat,
    Hello,
    Link,
    LinkLost,
    LinkRefused,
    ModelCard,
    Open,
    Opened,
    Prefilled,
    PrefillProgress,
    Read,
    Ready,
    Reject,
    Renew,
    Resync,
    Sampling,
    Submit,
    Tokens,
    Verified,
    Verify,
    Welcome,
)
from common.wire.tensors import from_ids, from_numpy, to_ids, to_numpy, to_text
from common.wire.version import MAJOR, MINOR

VOCAB = 50
EOS_ID = 0
BLOCK = 8
CONTROL = Peer(CONTROL_LINK)
BEAT_S = 0.5
CARD = ModelCard("scripted", VOCAB, 1, 4096, BLOCK, 0, (0,), "mean", "f", "n", "e", "h", "t")


def next_id(ids):
    """The rule: what follows these ids."""
    return zlib.crc32(np.asarray(ids, np.int32).tobytes()) % VOCAB


def repeating_id(ids):
    """A rule whose text repeats every ten ids, but for a surprise every 37th."""
    return next_id(ids) if len(ids) % 37 == 0 else ids[-10]


def plain_reply(prompt_ids, max_tokens, *, ignore_eos=True, rule=next_id):
    """The oracle: plain decoding, ids and finish reason."""
    ids, reply = list(prompt_ids), []
    while len(reply) < max_tokens:
        token = rule(ids)
        if token == EOS_ID and not ignore_eos:
            return reply, "stop"
        ids.append(token)
        reply.append(token)
    return reply, "length"


class Clocked:
    """An actor with one pair of hands: work takes virtual time and is done in order."""

    def __init__(self):
        self._agenda = []
        self._order = itertools.count()
        self._busy_until = 0.0

    def do(self, now, cost_s, call):
        """Call `call(then)` when the work before it and its own cost are over."""
        self._busy_until = max(now, self._busy_until) + cost_s
        self.at(self._busy_until, call)

    def at(self, moment, call):
        heapq.heappush(self._agenda, (moment, next(self._order), call))

    def next_deadline(self):
        return self._agenda[0][0] if self._agenda else None

    def on_time(self, now):
        while self._agenda and self._agenda[0][0] <= now:
            heapq.heappop(self._agenda)[2](now)

    def work(self, now):
        return False


class ScriptedWorker(Clocked):
    """Registers, beats, and comes back after a loss; what it does is its subclass's business."""

    role = ""

    def __init__(self, shell, name, *, capacity=8, card=CARD):
        super().__init__()
        self.shell, self.name, self.capacity, self.card = shell, name, capacity, card
        self.sessions = {}
        self.is_wedged = False
        self.said_bye = False

    def ready(self):
        return Ready(self.capacity)

    def start(self, now):
        self.shell.start(self)
        self._hello(now)
        self.at(now + BEAT_S, self._beat)

    def _hello(self, now):
        self.shell.report(Hello(self.role, self.name, MAJOR, MINOR, "test", 1, self.card))

    def _beat(self, now):
        age_ms = 1e9 if self.is_wedged else 0.0
        self.shell.report(Heartbeat("ready", len(self.sessions), age_ms, 0))
        self.shell.report(self.ready())  # in case the first was dropped
        if not self.said_bye:
            self.at(now + BEAT_S, self._beat)

    def on_message(self, peer, message, now):
        if self.is_wedged:
            return
        match message:
            case Welcome():
                self.shell.report(self.ready())
            case Reject():
                self.sessions.clear()
                self._hello(now)
            case Bye():
                self.said_bye = True
            case Heartbeat():
                pass
            case _:
                self.take(peer, message, now)

    def on_lost(self, peer, now):
        if peer == CONTROL:
            self.sessions.clear()

    def heartbeat(self):
        return "ready", len(self.sessions), {}

    def say(self, message):
        self.shell.send(CONTROL, message)


@dataclass
class Held:
    """One session at a scripted target."""

    open: Open
    ids: list  # forwarded: prompt and committed, without the anchor
    anchor: int = -1
    n_generated: int = 0
    round_index: int = 0
    ticket: str = ""
    link: Peer | None = None
    block: Block | None = None
    waiting: Verify | None = None
    last: Verified | None = None
    prefilled: Prefilled | None = None


class ScriptedTarget(ScriptedWorker):
    """Verifies by the rule.

    `widths` counts rows run, `drafts` what was accepted of what was sent, for proofs of drafting.
    """

    role = "target"

    def __init__(
        self,
        shell,
        name,
        *,
        endpoint,
        ladder_ms=(),
        verify_s=0.01,
        rule=next_id,
        notes=None,
        **changes,
    ):
        super().__init__(shell, name, **changes)
        self.notes = notes or {}
        self.rule = rule
        self.endpoint, self.ladder_ms, self.verify_s = endpoint, ladder_ms, verify_s
        self.verdicts = []  # (rows asked for, rows run, accepted)
        self.verifies = {}  # key without draft -> Verify, to find a changed one
        self.opens = []

    def ready(self):
        return Ready(self.capacity, tuple(self.ladder_ms), self.endpoint, notes=self.notes)

    def take(self, peer, message, now):
        match message:
            case Open():
                self.do(now, 0.0, lambda then: self._open(message, then))
            case Verify():
                self._verify(message, now)
            case Draft():
                self._draft(message)
            case Block():
                self._block(peer, message, now)
            case Link():
                self._link(peer, message)
            case Resync():
                held = self.sessions.get(message.session)
                if held and held.link == peer:
                    self._push(held, message.from_pos)
            case Renew():
                held = self.sessions.get(message.session)
                if held:
                    held.ticket, held.link = message.ticket, None
            case Close():
                self.sessions.pop(message.session, None)

    def on_lost(self, peer, now):
        super().on_lost(peer, now)
        for held in self.sessions.values():
            if held.link == peer:
                held.link = None

    def _open(self, message, now):
        held = self.sessions.get(message.session)
        if held is None:
            is_text = message.prompt.dtype == "uint8"
            ids = list(to_text(message.prompt).encode()) if is_text else to_ids(message.prompt)
            held = Held(message, ids, ticket=message.ticket, n_generated=message.n_replayed)
            self.sessions[message.session] = held
            self.opens.append(message)
            self.do(now, 0.002 * len(ids), lambda then: self._prefilled(message.session, then))
        self.say(Opened(message.session, message.epoch, from_ids(held.ids)))
        if held.prefilled:
            self.say(held.prefilled)

    def _prefilled(self, session, now):
        held = self.sessions.get(session)
        if held is None:
            return
        self._push(held, 0)
        self.say(PrefillProgress(session, len(held.ids), len(held.ids)))
        held.anchor = self.rule(held.ids)
        ids, finish = self._emit(held, [held.anchor])
        held.prefilled = Prefilled(
            session=session,
            epoch=held.open.epoch,
            anchor_id=held.anchor,
            base=len(held.ids),
            piece=_piece(ids[0]) if ids else "",
            finish=finish,
            tail="",
            near_ties=0,
            ms=1.0,
            ngram_hits=1,
            ngram_misses=len(held.ids),
            cached_tokens=len(held.ids) - 1,
        )
        self.say(held.prefilled)

    def _emit(self, held, ids):
        kept = []
        for token in ids:
            if token == EOS_ID and not held.open.sampling.ignore_eos:
                return kept, "stop"
            kept.append(token)
            held.n_generated += 1
            if held.n_generated >= held.open.sampling.max_tokens:
                return kept, "length"
        return kept, ""

    def _link(self, peer, message):
        held = self.sessions.get(message.session)
        if held is None or not held.ticket or held.ticket != message.ticket:
            self.shell.send(peer, LinkRefused(message.session, message.ticket, "unknown ticket"))
            return
        held.link = peer
        self._push(held, message.have_pos)

    def _push(self, held, first_pos):
        if held.link is None or first_pos >= len(held.ids):
            return
        rows = from_numpy(np.asarray(held.ids[first_pos:], np.float32)[:, None])
        features = Features(held.open.session, held.open.epoch, first_pos, rows)
        if not self.shell.send(held.link, features):
            held.link = None

    def _draft(self, message):
        """Draft by the rule, as a head of its own would; every third block ends in a wrong id."""
        held = self.sessions[message.key.session]
        ids = [*held.ids, held.anchor]
        for _ in range(message.n_drafts):
            ids.append(self.rule(ids))
        drafts = ids[len(held.ids) + 1 :]
        if message.key.round_index % 3 == 0:
            drafts[-1] += 1
        confidences = (0.9,) * len(drafts)
        held.block = Block(message.key, tuple(drafts), confidences)
        self.say(Drafted(message.key, confidences, 0.5))

    def _verify(self, message, now):
        key = message.key
        held = self.sessions.get(key.session)
        if held is None:
            self.say(Failed(key.session, "bad_request", f"session {key.session} is not open"))
            return
        named = (key.session, key.round_index)
        assert self.verifies.setdefault(named, message) == message, "a round's Verify changed"
        if held.last is not None and held.last.key == key:
            self.say(held.last)
            return
        if (key.round_index, key.base, key.anchor_id) != self._present(held):
            return
        if message.rows == 1 or message.copy_ids:
            self._run(held, message, message.copy_ids, now)
        elif held.block is not None and held.block.key == key:
            self._run(held, message, held.block.ids, now)
        elif held.waiting is None:
            held.waiting = message
            self.at(now + message.block_deadline_ms / 1e3, lambda then: self._too_late(held, then))

    def _present(self, held):
        return held.round_index, len(held.ids), held.anchor

    def _too_late(self, held, now):
        if held.waiting is not None:
            self._run(held, held.waiting, (), now)

    def _block(self, peer, block, now):
        held = self.sessions.get(block.key.session)
        if held is None or held.link != peer:
            return
        if (block.key.round_index, block.key.base, block.key.anchor_id) != self._present(held):
            return
        held.block = block
        if held.waiting is not None and held.waiting.key == block.key:
            self._run(held, held.waiting, block.ids, now)

    def _run(self, held, order, draft_ids, now):
        held.waiting, held.block = None, None
        held.round_index += 1
        drafts = list(draft_ids[: order.rows - 1])
        if any(not 0 <= token < VOCAB for token in drafts):
            drafts, held.link = [], None
            self.say(LinkLost(held.open.session, held.ticket, "ids outside the vocabulary"))
        cost_s = self.verify_s * (1 + 0.1 * len(drafts))
        self.do(now, cost_s, lambda then: self._verdict(held, order, drafts, cost_s))

    def _verdict(self, held, order, drafts, cost_s):
        first = len(held.ids)
        held.ids.append(held.anchor)
        n_accepted = 0
        while n_accepted < len(drafts) and drafts[n_accepted] == self.rule(held.ids):
            held.ids.append(drafts[n_accepted])
            n_accepted += 1
        held.anchor = self.rule(held.ids)
        ids, finish = self._emit(held, [*drafts[:n_accepted], held.anchor])
        self.verdicts.append((order.rows, len(drafts) + 1, n_accepted))
        held.last = Verified(
            key=order.key,
            rows_run=len(drafts) + 1,
            n_accepted=n_accepted,
            ids=tuple(ids),
            pieces=tuple(_piece(token) for token in ids),
            finish=finish,
            tail="!" if finish else "",
            near_ties=0,
            ms=cost_s * 1e3,
            wait_ms=0.0,
            ngram_hits=2 * len(drafts),
            ngram_misses=len(drafts) + 1,
        )
        if self.sessions.get(held.open.session) is held:
            self.say(held.last)
            self._push(held, first)


def _piece(token):
    return f"<{token}>"


@dataclass
class Fed:
    """One session at a scripted drafter."""

    attach: Attach
    target: Peer
    ids: list = field(default_factory=list)
    draft: Draft | None = None


RIGHT, WRONG, LATE, SILENT = "right", "wrong", "late", "silent"
OUTSIDE, SHORT, LONG, DOUBTFUL, FAULTY = "outside", "short", "long", "doubtful", "faulty"
MODES = (RIGHT, WRONG, "wrong at 3", LATE, SILENT, OUTSIDE, SHORT, LONG, DOUBTFUL, FAULTY)


class ScriptedDrafter(ScriptedWorker):
    """Drafts by the rule, or breaks it as told.

    Args:
        modes: one per draft, repeated: `right`, `wrong`, `wrong at N`, `late`, `silent`,
            `outside` (ids outside the vocabulary), `short` and `long` (wrong number of ids),
            `doubtful` (more confidences than asked for), `faulty` (DraftFailed).
    """

    role = "drafter"

    def __init__(self, shell, name, *, modes=(RIGHT,), draft_s=0.002, **changes):
        super().__init__(shell, name, **changes)
        self._modes = itertools.cycle(modes)
        self._draft_s = draft_s
        self.asked = 0
        self.attached = []

    def take(self, peer, message, now):
        match message:
            case Attach():
                self._attach(message)
            case Features():
                self._features(peer, message, now)
            case Draft():
                self._draft(message, now)
            case LinkRefused():
                fed = self.sessions.get(message.session)
                if fed and fed.attach.ticket == message.ticket:
                    self._lose(message.session, message.reason)
            case Close():
                self.sessions.pop(message.session, None)

    def on_lost(self, peer, now):
        super().on_lost(peer, now)
        for session in [s for s, fed in self.sessions.items() if fed.target == peer]:
            self._lose(session, "connection lost")

    def _lose(self, session, reason):
        fed = self.sessions.pop(session)
        self.say(LinkLost(session, fed.attach.ticket, reason))

    def _attach(self, message):
        known = self.sessions.get(message.session)
        fed = Fed(message, self.shell.dial(message.endpoint, message.server_key))
        if known and known.attach.epoch == message.epoch:
            fed.ids = known.ids
        self.sessions[message.session] = fed
        self.attached.append(message)
        link = Link(message.session, message.epoch, message.ticket, len(fed.ids))
        if not self.shell.send(fed.target, link):
            self._lose(message.session, "cannot be reached")

    def _features(self, peer, message, now):
        fed = self.sessions.get(message.session)
        if fed is None or fed.target != peer or fed.attach.epoch != message.epoch:
            return
        if message.first_pos > len(fed.ids):
            self.shell.send(peer, Resync(message.session, message.epoch, len(fed.ids)))
            return
        rows = to_numpy(message.rows)[:, 0].astype(int).tolist()
        fed.ids += rows[len(fed.ids) - message.first_pos :]
        self._try(fed, now)

    def _draft(self, message, now):
        self.asked += 1
        fed = self.sessions.get(message.key.session)
        if fed is None:
            self.say(DraftFailed(message.key, "unknown_session"))
            return
        fed.draft = message
        self.at(now + message.deadline_ms / 1e3, lambda then: self._give_up(fed, message))
        self._try(fed, now)

    def _give_up(self, fed, message):
        if fed.draft is message:
            fed.draft = None
            self.say(DraftFailed(message.key, "no_context"))

    def _try(self, fed, now):
        order = fed.draft
        if order is None or len(fed.ids) < order.key.base:
            return
        fed.draft = None
        if len(fed.ids) > order.key.base:
            self.say(DraftFailed(order.key, "stale"))
            return
        mode = next(self._modes)
        cost_s = 10.0 if mode == LATE else self._draft_s
        ids = list(fed.ids)
        if mode == LATE:
            self.at(now + cost_s, lambda _: self._answer(fed, order, ids, mode))
        elif mode != SILENT:
            self.do(now, cost_s, lambda _: self._answer(fed, order, ids, mode))

    def _answer(self, fed, order, ids, mode):
        if mode == FAULTY:
            self.say(DraftFailed(order.key, "fault"))
            return
        drafts = tuple(self._drafts(order, ids, mode))
        self.shell.send(fed.target, Block(order.key, drafts, (0.95,) * len(drafts)))
        n_said = len(drafts) + 3 if mode == DOUBTFUL else len(drafts)
        self.say(Drafted(order.key, (0.95,) * n_said, self._draft_s * 1e3))

    def _drafts(self, order, ids, mode):
        ids, drafts = [*ids, order.key.anchor_id], []
        for _ in range(order.n_drafts):
            drafts.append(next_id(ids))
            ids.append(drafts[-1])
        wrong_from = {WRONG: 0}.get(mode, len(drafts))
        if mode.startswith("wrong at "):
            wrong_from = int(mode.removeprefix("wrong at "))
        drafts = [(d + (k >= wrong_from)) % VOCAB for k, d in enumerate(drafts)]
        if mode == OUTSIDE:
            drafts[0] = VOCAB + 7
        if mode == SHORT:
            drafts = drafts[:1]
        if mode == LONG:
            drafts = [*drafts, *drafts][:15]
        return drafts


class ScriptedClient:
    """Submits requests and checks every stream: contiguous indices, one end.

    With a window it says Read after each Tokens, unless `reads_on` is False.
    """

    def __init__(self, mesh, name, *, control="coordinator"):
        self.windows, self.reads_on = {}, True
        self.mesh, self.name, self.control = mesh, name, control
        self.replies, self.pieces, self.ends, self.accepted = {}, {}, {}, {}
        mesh.add(name, on_message=self._take)
        self.send(Hello("client", name, MAJOR, MINOR, "test", 1))

    def send(self, message):
        return self.mesh.send(self.name, self.control, message)

    def submit(
        self,
        request,
        prompt_ids,
        max_tokens=32,
        *,
        draft=True,
        deadline_ms=0,
        claim="",
        have=(),
        window=0,
        **sampling,
    ):
        """Submit, or with a claim resume with the tokens that another client had."""
        self.replies[request], self.pieces[request] = list(have), []
        self.windows[request] = window
        sampling = Sampling(max_tokens=max_tokens, **{"ignore_eos": True, **sampling})
        asked = {"claim": claim, "from_index": len(have), "window": window}
        self.send(Submit(request, from_ids(prompt_ids), sampling, draft, deadline_ms, **asked))

    def read(self, request):
        self.send(Read(request, len(self.replies[request])))

    def cancel(self, request):
        self.send(Cancel(request))

    @property
    def is_done(self):
        return set(self.ends) == set(self.replies)

    def _take(self, sender, message, now):
        match message:
            case Accepted():
                self.accepted[message.request] = message
            case Tokens():
                assert message.request not in self.ends, "tokens after the end"
                assert message.index == len(self.replies[message.request]), "a gap or a repetition"
                self.replies[message.request] += message.ids
                self.pieces[message.request] += message.pieces
                if self.windows.get(message.request) and self.reads_on:
                    self.read(message.request)
            case Done():
                assert message.request not in self.ends, "two ends"
                assert message.n_tokens == len(self.replies[message.request])
                self.ends[message.request] = message
            case Failed():
                assert message.name not in self.ends, "two ends"
                self.ends[message.name] = message


def shuffled(seed, items):
    """A seeded order."""
    return random.Random(seed).sample(items, len(items))
