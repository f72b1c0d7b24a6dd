"""One request as events and commands."""

import pytest

from common.coordinator.events import (
    DeadlineReached,
    DrafterAssigned,
    DrafterLost,
    DraftTook,
    Ended,
    LeaveDrafter,
    LeaveTarget,
    Phase,
    Placed,
    ReaderReady,
    Request,
    RoundDone,
    Scene,
    Stopped,
    StrikeDrafter,
    TargetLost,
    TargetStuck,
    ToClient,
    ToDrafter,
    ToTarget,
    WantTarget,
)
from common.coordinator.machine import RequestMachine
from common.coordinator.waits import Limits
from common.policy.policy import Fixed
from common.wire.messages import (
    Attach,
    Close,
    Draft,
    Drafted,
    DraftFailed,
    Failed,
    Open,
    Opened,
    Prefilled,
    PrefillProgress,
    Renew,
    RoundKey,
    Sampling,
    Tokens,
    Verified,
    Verify,
)
from common.wire.tensors import from_ids, from_text, to_ids

SCENE = Scene(draft_deadline_s=0.05)
PROMPT = (5, 6, 7)
LIMITS = Limits(prefill_s=10.0, verify_s=5.0, resend_s=1.0, max_replays=1)


def machine_of(max_tokens=20, **changes):
    words = iter(["t0", "t1", "t2", "t3"])
    asked = {"draft": True, "expires_at": None, **changes}
    request = Request(
        7, "client", "r", from_text("abc"), Sampling(max_tokens), submitted_at=0.0, **asked
    )
    return RequestMachine(request, LIMITS, lambda: next(words))


def feed(machine, event, now=0.0, scene=SCENE):
    return machine.handle(event, now, scene)


def opened(**changes):
    machine = machine_of(**changes)
    feed(machine, Placed(Fixed(), has_taps=True))
    feed(machine, Opened("7.0", 0, from_ids(PROMPT)))
    return machine


def attached(**changes):
    machine = opened(**changes)
    feed(machine, DrafterAssigned("ipc://x", "", 4))
    return machine


def prefilled(finish="", session="7.0", epoch=0, base=3, anchor=8, piece="<8>"):
    return Prefilled(session, epoch, anchor, base, piece, finish, "", 0, 1.0)


def drafting(**changes):
    """In round 0, waiting for three drafts; anchor 8 at position 3."""
    machine = attached(**changes)
    feed(machine, prefilled())
    return machine


KEY = RoundKey("7.0", 0, 0, 3, 8, 1)
PLAIN_KEY = RoundKey("7.0", 0, 0, 3, 8, 0)


def verified(key, rows, n_accepted, ids, finish=""):
    pieces = tuple(f"<{token}>" for token in ids)
    return Verified(key, rows, n_accepted, tuple(ids), pieces, finish, "", 0, 2.0, 0.0)


def verifying(rows=4, **changes):
    machine = drafting(**changes)
    feed(machine, Drafted(KEY, (0.9,) * (rows - 1), 1.0), 0.01)
    return machine


def test_placing_opens_the_session_with_a_ticket():
    """The target must know the ticket before any drafter does."""
    machine = machine_of()
    (command,) = feed(machine, Placed(Fixed(), has_taps=True))
    expected = Open("7.0", 0, "t0", from_text("abc"), 0, Sampling(20), True)
    assert command == ToTarget(expected)
    assert not machine.wants_drafter(0.0)


def test_without_taps_no_ticket_is_made_and_no_drafter_wanted():
    """`--no-draft` must leave no door open."""
    machine = machine_of()
    (command,) = feed(machine, Placed(Fixed(), has_taps=False))
    feed(machine, Opened("7.0", 0, from_ids(PROMPT)))
    assert (command.message.ticket, command.message.taps) == ("", False)
    assert not machine.wants_drafter(0.0)


def test_drafter_is_attached_after_opened_with_the_tickets_of_open():
    """Only then can its Link succeed."""
    machine = opened()
    assert machine.wants_drafter(0.0)
    commands = feed(machine, DrafterAssigned("ipc://x", "key", 4))
    assert commands == [ToDrafter(Attach("7.0", 0, "t0", "ipc://x", "key"))]


def test_second_drafter_gets_a_new_ticket_which_the_target_hears_first():
    """A ticket that was given away once must open nothing any more."""
    machine = attached()
    feed(machine, DrafterLost("gone"))
    commands = feed(machine, DrafterAssigned("ipc://x", "", 4))
    assert commands == [
        ToTarget(Renew("7.0", "t1")),
        ToDrafter(Attach("7.0", 0, "t1", "ipc://x", "")),
    ]


def test_prefill_progress_reaches_the_client_under_its_own_name():
    """The client does not know sessions."""
    commands = feed(opened(), PrefillProgress("7.0", 2, 3))
    assert commands == [ToClient(PrefillProgress("r", 2, 3))]


def test_first_token_reaches_the_client_at_once_and_a_draft_is_asked_for():
    """The token that prefill chose must not wait for a round."""
    commands = feed(attached(), prefilled())
    draft = Draft(KEY, 3, pytest.approx(40.0))
    assert commands == [ToClient(Tokens("r", 0, (8,), ("<8>",), 0)), ToDrafter(draft)]


def test_without_a_drafter_the_round_is_plain():
    """A plain round is the same code path with no draft."""
    commands = feed(opened(), prefilled())
    assert commands[1:] == [ToTarget(Verify(PLAIN_KEY, 1, 0.0))]


def test_draft_is_verified_at_the_policys_width():
    """The block is named by its draft id."""
    commands = feed(drafting(), Drafted(KEY, (0.9, 0.8, 0.7), 1.0), 0.01)
    assert commands == [DraftTook(pytest.approx(10.0)), ToTarget(Verify(KEY, 4, 50.0))]


@pytest.mark.parametrize("reason", ["no_context", "stale"])
def test_failed_draft_is_a_plain_round(reason):
    """A context that is still being fed is nobody's fault."""
    commands = feed(drafting(), DraftFailed(KEY, reason))
    assert commands == [ToTarget(Verify(PLAIN_KEY, 1, 0.0))]


def test_late_draft_is_a_plain_round_and_a_strike():
    """Waiting longer than the deadline costs more than a draft can bring."""
    machine = drafting()
    assert machine.due == pytest.approx(0.05)
    commands = feed(machine, DeadlineReached(), 0.05)
    assert commands == [StrikeDrafter("draft late"), ToTarget(Verify(PLAIN_KEY, 1, 0.0))]


def test_draft_that_comes_after_its_deadline_is_dropped():
    """It would be a second, different Verify of the same round."""
    machine = drafting()
    feed(machine, DeadlineReached(), 0.05)
    assert feed(machine, Drafted(KEY, (0.9,) * 3, 1.0), 0.06) == []
    assert machine.n_stale == 1


@pytest.mark.parametrize(
    "changes",
    [{"epoch": 1}, {"round_index": 1}, {"base": 4}, {"anchor_id": 9}, {"draft_id": 2}],
)
def test_draft_of_another_identity_is_dropped(changes):
    """Each field of the key alone makes a message stale."""
    key = RoundKey(**{**{f: getattr(KEY, f) for f in KEY.__slots__}, **changes})
    machine = drafting()
    assert feed(machine, Drafted(key, (0.9,) * 3, 1.0)) == []
    assert machine.n_stale == 1
    assert machine.phase is Phase.DRAFTING


@pytest.mark.parametrize(
    "confidences", [(), (0.9,) * 4, (0.9, 1.5, 0.9), (0.9, -0.1, 0.9), (float("nan"),) * 3]
)
def test_impossible_draft_is_a_strike_and_a_plain_round(confidences):
    """A lying drafter costs time, never output."""
    commands = feed(drafting(), Drafted(KEY, confidences, 1.0))
    assert isinstance(commands[0], StrikeDrafter)
    assert commands[1:] == [ToTarget(Verify(PLAIN_KEY, 1, 0.0))]


def test_lost_drafter_during_a_draft_is_a_plain_round_at_once():
    """Nobody will answer; the deadline need not be waited for."""
    commands = feed(drafting(), DrafterLost("connection lost"))
    assert commands == [
        ToDrafter(Close("7.0")),
        LeaveDrafter(),
        ToTarget(Verify(PLAIN_KEY, 1, 0.0)),
    ]


def test_lost_drafter_during_a_verify_changes_nothing_of_it():
    """A round's Verify is never sent differently."""
    machine = verifying()
    assert feed(machine, DrafterLost("gone")) == [ToDrafter(Close("7.0")), LeaveDrafter()]
    assert feed(machine, DeadlineReached(), 1.5) == [ToTarget(Verify(KEY, 4, 50.0))]


def test_unknown_session_at_the_drafter_ends_the_tie_for_a_while():
    """The drafter forgot us; asking again at once would loop."""
    machine = drafting()
    feed(machine, DraftFailed(KEY, "unknown_session"), 1.0)
    assert not machine.wants_drafter(1.0)
    assert machine.wants_drafter(1.5)


def test_verdict_is_committed_and_the_next_round_starts_at_the_bonus():
    """Positions move on by the accepted drafts and one."""
    machine = verifying()
    commands = feed(machine, verified(KEY, 4, 2, (11, 12, 13)), 0.03)
    draft = Draft(RoundKey("7.0", 0, 1, 6, 13, 2), 3, pytest.approx(40.0))
    assert commands[:2] == [
        ToDrafter(draft),
        ToClient(Tokens("r", 1, (11, 12, 13), ("<11>", "<12>", "<13>"), 2)),
    ]
    assert isinstance(commands[2], RoundDone)


def test_repeated_verdict_is_dropped():
    """A doubled message must not commit twice."""
    machine = verifying()
    feed(machine, verified(KEY, 4, 2, (11, 12, 13)))
    assert feed(machine, verified(KEY, 4, 2, (11, 12, 13))) == []
    assert machine.reply.ids == [8, 11, 12, 13]


@pytest.mark.parametrize(
    ("rows", "n_accepted", "ids"),
    [
        (5, 0, (1,)),
        (4, 4, (1, 2, 3, 4, 5)),
        (4, 1, (1,)),
        (4, 1, (1, 2, 3)),
        (1, 1, (1, 2)),
    ],
)
def test_impossible_verdict_ends_the_request(rows, n_accepted, ids):
    """What cannot be true must not be committed."""
    machine = verifying()
    commands = feed(machine, verified(KEY, rows, n_accepted, ids))
    assert commands[-1] == Ended("bad_message")
    assert machine.reply.ids == [8]


def test_silent_target_is_asked_again_and_then_found_stuck():
    """Every wait has a deadline, and a lost message must not cost the whole of it."""
    machine = verifying()
    repeated = [feed(machine, DeadlineReached(), now) for now in (1.02, 2.03, 3.04, 4.05)]
    assert repeated == [[ToTarget(Verify(KEY, 4, 50.0))]] * 4
    assert isinstance(feed(machine, DeadlineReached(), 5.02)[0], TargetStuck)


def test_open_is_asked_again():
    """A lost Open must not cost the prefill budget."""
    machine = machine_of()
    (first,) = feed(machine, Placed(Fixed(), has_taps=True))
    assert feed(machine, DeadlineReached(), 1.0) == [first]


def test_lost_target_is_replayed_with_prompt_and_committed_ids():
    """A new epoch; nothing that the client has is sent again."""
    machine = verifying()
    feed(machine, verified(KEY, 4, 2, (11, 12, 13)))
    commands = feed(machine, TargetLost("gone", can_replay=True))
    assert commands == [
        ToDrafter(Close("7.0")),
        LeaveDrafter(),
        ToTarget(Close("7.0")),
        LeaveTarget(),
        WantTarget(),
    ]
    (command,) = feed(machine, Placed(Fixed(), has_taps=True))
    assert (command.message.session, command.message.epoch) == ("7.1", 1)
    assert to_ids(command.message.prompt) == [*PROMPT, 8, 11, 12, 13]
    assert (command.message.ticket, command.message.n_replayed) == ("t1", 4)


def test_verdict_of_the_old_epoch_is_dropped_after_a_replay():
    """A target that comes back must not commit twice."""
    machine = verifying()
    feed(machine, TargetLost("gone", can_replay=True))
    feed(machine, Placed(Fixed(), has_taps=True))
    assert feed(machine, verified(KEY, 4, 2, (11, 12, 13))) == []


def test_tokens_after_a_replay_go_on_where_they_were():
    """Indices are contiguous over targets."""
    machine = verifying()
    feed(machine, TargetLost("gone", can_replay=True))
    feed(machine, Placed(Fixed(), has_taps=True))
    feed(machine, Opened("7.1", 1, from_ids([*PROMPT, 8])))
    commands = feed(machine, prefilled(session="7.1", epoch=1, base=4, anchor=11))
    assert commands[0].message.index == 1
    assert commands[1].message.key == RoundKey("7.1", 1, 0, 4, 11, 0)


def test_replays_have_a_limit():
    """A prompt that kills targets must not kill them all."""
    machine = verifying()
    feed(machine, TargetLost("gone", can_replay=True))
    feed(machine, Placed(Fixed(), has_taps=True))
    commands = feed(machine, TargetLost("gone too", can_replay=True))
    assert commands[0].message.code == "peer_lost"
    assert commands[-1] == Ended("peer_lost")


def test_lost_target_without_another_is_an_error_at_once():
    """A typed error within a second, not a hang."""
    commands = feed(verifying(), TargetLost("gone", can_replay=False))
    assert isinstance(commands[0].message, Failed)
    assert "after 1 tokens" in commands[0].message.message


def test_session_that_the_target_forgot_is_opened_again():
    """A target that reconnected knows nothing of us."""
    failed = Failed("7.0", "bad_request", "not open")
    assert feed(verifying(), failed)[-1] == WantTarget()


def test_fault_of_the_engine_is_passed_on():
    """A prompt that is too long is the client's to shorten."""
    commands = feed(opened(), Failed("7.0", "too_long", "4000 over 2048"))
    assert commands[0] == ToClient(Failed("r", "too_long", "4000 over 2048"))
    assert commands[-1] == Ended("too_long")


def test_prefill_that_ends_the_text_emits_nothing():
    """The stop token is not part of the text."""
    commands = feed(attached(), prefilled(finish="stop", piece=""))
    assert commands[0].message.n_tokens == 0
    assert commands[-1] == Ended("stop")


def test_text_before_a_stop_string_in_the_first_token_is_emitted():
    """One token may hold the end of the reply and the beginning of a stop string."""
    commands = feed(attached(), prefilled(finish="stop", piece="<"))
    assert commands[0].message.pieces == ("<",)
    assert commands[1].message.n_tokens == 1
    assert commands[-1] == Ended("stop")


@pytest.mark.parametrize("make", [machine_of, opened, attached, drafting, verifying])
def test_stopping_in_any_phase_frees_what_is_held(make):
    """Cancels leaked places."""
    machine = make()
    had_target, had_drafter = bool(machine.session), machine.attachment.is_held
    commands = feed(machine, Stopped("cancelled", "enough"))
    assert (LeaveTarget() in commands, LeaveDrafter() in commands) == (had_target, had_drafter)
    assert (commands[0].message.code, commands[-1]) == ("cancelled", Ended("cancelled"))


def test_nothing_happens_after_the_end():
    """Late messages of a finished request are nobody's business."""
    machine = verifying()
    feed(machine, Stopped("cancelled", "enough"))
    assert feed(machine, verified(KEY, 4, 2, (11, 12, 13))) == []
    assert machine.due is None


def test_last_token_is_not_drafted_for():
    """A draft for the last token is thrown away whole."""
    machine = attached(max_tokens=2)
    commands = feed(machine, prefilled())
    assert commands[1:] == [ToTarget(Verify(PLAIN_KEY, 1, 0.0))]


# --------------------------------------------------------------------------- readers behind

BEHIND = Scene(draft_deadline_s=0.05, is_reader_behind=True)


def paused():
    """After one round, for want of a reader."""
    machine = verifying()
    verdict = verified(KEY, 4, 3, (11, 12, 13, 14))
    commands = feed(machine, verdict, 1.0, BEHIND)
    assert [type(command) for command in commands] == [ToClient, RoundDone]
    return machine


def test_no_round_begins_while_the_reader_is_behind():
    """Its tokens would have to be kept somewhere."""
    machine = paused()
    assert machine.phase is Phase.PAUSED
    assert machine.due == 1.0 + LIMITS.slow_reader_s
    assert feed(machine, DeadlineReached(), 2.0) == []


def test_round_begins_when_the_reader_has_read_on():
    """A pause changes nothing but the time."""
    machine = paused()
    (command,) = feed(machine, ReaderReady(), 9.0)
    assert isinstance(command.message, Draft)
    assert (command.message.key.base, command.message.key.round_index) == (7, 1)
    assert machine.phase is Phase.DRAFTING


def test_reader_ready_outside_a_pause_is_nothing():
    """A Read may cross the end of a pause."""
    assert feed(verifying(), ReaderReady()) == []
    assert feed(machine_of(), ReaderReady()) == []


def test_pause_ends_with_a_typed_error_and_frees_everything():
    """A place at a target is not held for ever."""
    machine = paused()
    commands = feed(machine, DeadlineReached(), 1.0 + LIMITS.slow_reader_s)
    assert commands[0].message.code == "slow_reader"
    assert commands[1:] == [
        ToDrafter(Close("7.0")),
        LeaveDrafter(),
        ToTarget(Close("7.0")),
        LeaveTarget(),
        Ended("slow_reader"),
    ]


def test_losses_during_a_pause_are_taken_as_ever():
    """Drafter, then target, then the client's own wish."""
    machine = paused()
    assert feed(machine, DrafterLost("gone")) == [ToDrafter(Close("7.0")), LeaveDrafter()]
    assert machine.phase is Phase.PAUSED
    assert feed(machine, TargetLost("gone", can_replay=True))[-1] == WantTarget()
    assert machine.phase is Phase.WAITING
    assert feed(machine, Stopped("cancelled", "x"))[-1] == Ended("cancelled")
