"""What happens next in one request: event in, commands out.

Owns the state of one request from admission to its end, its committed ids and its identity
(session, epoch, round). Does not know sockets, other requests or who the workers are; time is
passed in.

    WAITING    -> Placed          -> Open                        PREFILLING
    PREFILLING -> Prefilled       -> first token to the client   DRAFTING or VERIFYING
    DRAFTING   -> Drafted         -> Verify(rows)                VERIFYING
               -> failed, late    -> Verify(no draft, rows=1)    VERIFYING
    VERIFYING  -> Verified        -> tokens to the client        DRAFTING or VERIFYING, or ENDED
               -> .. which is behind                             PAUSED until ReaderReady
    any        -> TargetLost      -> once more from WAITING, or ENDED
    any        -> DrafterLost     -> goes on without; Stopped -> Close, ENDED
Invariants: a round's Verify never changes once sent; whatever does not carry the present round's
key is dropped and counted; indices of tokens sent to the client are contiguous from 0.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import assert_never

from common.coordinator.attachment import Attachment
from common.coordinator.events import (
    Command,
    DeadlineReached,
    DrafterAssigned,
    DrafterLost,
    Ended,
    Event,
    LeaveTarget,
    Phase,
    Placed,
    ReaderReady,
    Request,
    Scene,
    Stopped,
    TargetLost,
    TargetStuck,
    ToClient,
    ToTarget,
    WantTarget,
)
from common.coordinator.outgoing import first_token, open_message, round_tokens
from common.coordinator.reply import Reply
from common.coordinator.rounds import RoundFault, RoundSequence
from common.coordinator.waits import Limits, Wait
from common.errors import BadRequest, PeerLost, SlowReader
from common.policy.policy import Off, RoundPolicy
from common.wire.messages import (
    Close,
    Done,
    Drafted,
    DraftFailed,
    Failed,
    Open,
    Opened,
    Prefilled,
    PrefillProgress,
    Tokens,
    Verified,
)
from common.wire.tensors import to_ids


class RequestMachine:
    """One request.

    Args:
        request: what was asked for.
        limits: time budgets.
        new_ticket: makes an unguessable word.

    Attributes:
        phase: where it stands.
        session: its present name at the workers; "" while it waits.
        attachment: its tie to a drafter.
        n_stale: messages dropped because they named another round.
    """

    def __init__(self, request: Request, limits: Limits, new_ticket: Callable[[], str]) -> None:
        self.request = request
        self.reply = Reply(request.submitted_at, request.sampling)
        self.phase = Phase.WAITING
        self.session = ""
        self.attachment = Attachment(new_ticket)
        self.n_stale = 0
        self._limits = limits
        self._epoch = -1
        self._policy: RoundPolicy = Off()
        self._prompt_ids: list[int] | None = None
        self._rounds = RoundSequence(request.sampling)
        self._wait = Wait(limits.resend_s)

    @property
    def due(self) -> float | None:
        """When it wants DeadlineReached, in monotonic seconds; None: never."""
        return None if self.phase is Phase.ENDED else self._wait.due

    def wants_drafter(self, now: float) -> bool:
        """Whether a drafter would be of use and may be asked."""
        is_placed = self.phase not in (Phase.WAITING, Phase.ENDED)
        return is_placed and self._prompt_ids is not None and self.attachment.wants(now)

    def handle(self, event: Event, now: float, scene: Scene) -> list[Command]:
        """Take one event; returns what is to be done, in order."""
        if self.phase is Phase.ENDED:
            return []
        match event:
            case Placed():
                return self._open(event, now)
            case Opened():
                return self._on_opened(event, now)
            case PrefillProgress():
                return self._on_progress(event, now)
            case Prefilled():
                return self._on_prefilled(event, now, scene)
            case Drafted() | DraftFailed() | Verified():
                return self._in_round(event, now, scene)
            case DrafterAssigned():
                return self.attachment.attach(event)
            case DrafterLost():
                return self._drop_drafter(now + event.retry_s, now)
            case TargetLost():
                return self._on_target_lost(event)
            case Failed():
                return self._on_target_failed(event)
            case Stopped():
                return self._fail(event.code, event.message)
            case ReaderReady():
                return self._begin_round(now, scene) if self.phase is Phase.PAUSED else []
            case DeadlineReached():
                return self._on_deadline(now)
            case _:
                assert_never(event)

    def _open(self, event: Placed, now: float) -> list[Command]:
        self._epoch += 1
        self.session = f"{self.request.number}.{self._epoch}"
        self._policy = event.policy
        self._rounds.memory = self._rounds.memory or event.memory  # a replay keeps what it has
        self.attachment.open(
            self.session, self._epoch, has_taps=event.has_taps, own_block=event.own_block
        )
        self.phase = Phase.PREFILLING
        self._wait.begin(now, self._limits.prefill_s)
        return [ToTarget(self._open_message())]

    def _open_message(self) -> Open:
        named = self.request, self.session, self._epoch, self.attachment
        return open_message(*named, self._prompt_ids, self.reply.ids)

    def _on_opened(self, event: Opened, now: float) -> list[Command]:
        if not self._is_prefilling(event.session, event.epoch):
            return self._stale()
        if self._prompt_ids is None:
            self._prompt_ids = to_ids(event.prompt_ids)
            self._rounds.remember(self._prompt_ids)
        self._wait.begin(now, self._limits.prefill_s)
        return []

    def _on_progress(self, event: PrefillProgress, now: float) -> list[Command]:
        if not self._is_prefilling(event.name, self._epoch):
            return self._stale()
        self._wait.begin(now, self._limits.prefill_s)
        return [ToClient(replace(event, name=self.request.name))]

    def _on_prefilled(self, event: Prefilled, now: float, scene: Scene) -> list[Command]:
        is_opened = self._prompt_ids is not None  # else Opened was lost: Open will be repeated
        if not is_opened or not self._is_prefilling(event.session, event.epoch):
            return self._stale()
        tokens = first_token(event, self.request.name, len(self.reply.ids))
        commands = self._commit(tokens, event, now)
        if event.finish:
            return [*commands, *self._finish(event.finish, event.tail)]
        self._rounds.start(self.session, self._epoch, event.base, event.anchor_id)
        return [*commands, *self._begin_round(now, scene)]

    def _is_prefilling(self, session: str, epoch: int) -> bool:
        return self.phase is Phase.PREFILLING and session == self.session and epoch == self._epoch

    def _begin_round(self, now: float, scene: Scene) -> list[Command]:
        if scene.is_reader_behind:
            self.phase = Phase.PAUSED
            self._wait.until(now + self._limits.slow_reader_s)
            return []
        n_left = self.request.sampling.max_tokens - len(self.reply.ids)
        block_size = self.attachment.block_size if scene.can_draft else 0
        commands = self._rounds.begin(self._policy, block_size, n_left, now, scene)
        if self._rounds.is_drafting:
            self.phase = Phase.DRAFTING
            self._wait.until(now + scene.draft_deadline_s)
        else:
            self._wait_for_target(now)
        return commands

    def _in_round(
        self, event: Drafted | DraftFailed | Verified, now: float, scene: Scene
    ) -> list[Command]:
        current = self._rounds.current
        if current is None or not current.takes(event):
            return self._stale()
        try:
            commands = current.advance(event, now, scene)
        except RoundFault as fault:
            return self._fail("bad_message", str(fault))
        if isinstance(event, Verified):
            return [*self._on_verified(event, current.plain_reason, now, scene), *commands]
        if isinstance(event, DraftFailed) and event.reason == "unknown_session":
            commands += self._drop_drafter(now + self.attachment.retry_s(), now)
        self._wait_for_target(now)
        return commands

    def _on_verified(self, event: Verified, why: str, now: float, scene: Scene) -> list[Command]:
        self._rounds.finish(event)
        self.reply.count_round(event, why)
        tokens = round_tokens(event, self.request.name, len(self.reply.ids))
        commands = self._commit(tokens, event, now)
        if event.finish:
            return [*commands, *self._finish(event.finish, event.tail)]
        return [*self._begin_round(now, scene), *commands]  # workers first: they are what waits

    def _wait_for_target(self, now: float) -> None:
        self.phase = Phase.VERIFYING
        self._wait.begin(now, self._limits.verify_s)

    def _commit(self, tokens: Tokens, answer: Prefilled | Verified, now: float) -> list[Command]:
        self.reply.commit(tokens.ids, now, answer)
        self._rounds.remember(tokens.ids)
        return [ToClient(tokens)] if tokens.ids else []

    def _drop_drafter(self, closed_until: float, now: float) -> list[Command]:
        if not self.attachment.is_held:
            return []
        commands = self.attachment.leave(closed_until=closed_until)
        return [*commands, *self._give_up_draft(now)]

    def _give_up_draft(self, now: float, *, is_late: bool = False) -> list[Command]:
        current = self._rounds.current
        if current is None or not current.is_drafting:
            return []
        commands = current.give_up(now, is_late=is_late)
        self._wait_for_target(now)
        return commands

    def _on_deadline(self, now: float) -> list[Command]:
        if not self._wait.is_due(now):
            return []
        if self._rounds.is_drafting:
            return self._give_up_draft(now, is_late=True)
        if self.phase is Phase.PAUSED:
            text = f"{self.request.name}: not read on for {self._limits.slow_reader_s:g} s"
            return self._fail(SlowReader.code, f"request {text}")
        if not self._wait.ask_again(now):
            return [TargetStuck(f"no answer in phase {self.phase.name.lower()}")]
        current = self._rounds.current
        return current.repeat() if current else [ToTarget(self._open_message())]

    def _on_target_failed(self, event: Failed) -> list[Command]:
        """An unknown session can be opened again, any other fault of the session is final."""
        if event.name != self.session:
            return self._stale()
        if self.phase is not Phase.PREFILLING and event.code == BadRequest.code:
            return self._on_target_lost(TargetLost(event.message, can_replay=True))
        return self._fail(event.code, event.message, event.retry_after_s)

    def _on_target_lost(self, event: TargetLost) -> list[Command]:
        if not event.can_replay or self._epoch >= self._limits.max_replays:
            text = f"target lost after {len(self.reply.ids)} tokens ({event.reason})"
            return self._fail(PeerLost.code, f"{text}; send the request again")
        commands = self._leave()
        self._rounds.stop()
        self.phase = Phase.WAITING
        self.session = ""
        self._wait.end()
        return [*commands, WantTarget()]

    def _finish(self, reason: str, tail: str) -> list[Command]:
        done = Done(self.request.name, reason, tail, self.reply.stats(), len(self.reply.ids))
        return [ToClient(done), *self._end(reason)]

    def _fail(self, code: str, message: str, retry_after_s: float = 0.0) -> list[Command]:
        failed = ToClient(Failed(self.request.name, code, message, retry_after_s))
        return [failed, *self._end(code)]

    def _end(self, result: str) -> list[Command]:
        commands = self._leave()
        self.phase = Phase.ENDED
        self._rounds.stop()
        return [*commands, Ended(result)]

    def _leave(self) -> list[Command]:
        commands = self.attachment.leave()
        if self.session:
            commands += [ToTarget(Close(self.session)), LeaveTarget()]
        return commands

    def _stale(self) -> list[Command]:
        self.n_stale += 1
        return []
