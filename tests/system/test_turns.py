"""A chat of two turns through real processes: the second runs only what is new."""

import pytest
from support.running import ROOT, prompt_files, prompt_of, running
from tokenizers import Tokenizer

from common.sdk import Client, EndEvent, ProgressEvent, TokenEvent

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

CHUNK, MAX_TOKENS = 64, 80
ENVIRON = {
    "DFLASH_TARGET_VERIFY_WIDTH": "fixed",
    "DFLASH_POLICY_MODE": "fixed",
    "DFLASH_TARGET_PREFILL_CHUNK": str(CHUNK),
    "DFLASH_COORDINATOR_DRAFT_DEADLINE_MS": "5000",
}


def encode(text):
    folder = ROOT / "common" / "demo" / "pair" / "target"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer.encode(text, add_special_tokens=False).ids


def ask(client, ids, **options):
    """The reply's ids and statistics, and how far the prompt was when its first chunk had run."""
    events = list(
        client.stream(
            prompt_ids=ids, max_tokens=MAX_TOKENS, ignore_eos=True, timeout_s=60, **options
        )
    )
    done = [event.done for event in events if isinstance(event, ProgressEvent) and event.done]
    reply = [token for event in events if isinstance(event, TokenEvent) for token in event.ids]
    (end,) = [event for event in events if isinstance(event, EndEvent)]
    return reply, end.stats, done[0]


def chat(system, prompt):
    """Two turns, the first one twice, and the second also plain."""
    with Client(run_dir=system.run_dir) as client:
        first = ask(client, prompt)
        again = ask(client, prompt)
        turn = [*prompt, *first[0], *encode("\n\ndef main(argv):\n")]
        second, plain = ask(client, turn), ask(client, turn, draft=False)
    counters = {name: n for name, n in target_of(system).items() if name.startswith("prefix_")}
    return first, again, second, plain, len(turn), counters


def target_of(system):
    return system.worker("target.1")["counters"]


def test_turn_two_runs_only_what_is_new_and_drafts_as_well():
    """Tokens run again, a drafter without the cached rows, or another reply than without."""
    prompt = encode(prompt_of(prompt_files()[3]))[:300]
    with running(**ENVIRON) as system:
        first, again, second, plain, n_turn, counters = chat(system, prompt)
    with running(**ENVIRON, DFLASH_TARGET_PREFIX_CACHE_MB="0") as system:
        *cold, _, none = chat(system, prompt)

    assert [reply for reply, _, _ in (first, again, second, plain)] == [
        reply for reply, _, _ in cold
    ]
    known = len(prompt) + MAX_TOKENS - 1  # the first reply's last token was never forwarded
    cached = [stats["cached_tokens"] for _, stats, _ in (first, again, second, plain)]
    assert cached == [0, 256, known, 0]
    assert n_turn - known < CHUNK
    assert second[2] == known // CHUNK * CHUNK + CHUNK  # what is cached counts as done
    for (_, warm, _), (_, without, _) in zip((first, again, second), cold, strict=False):
        assert without["cached_tokens"] == 0
        for name in ("rounds", "drafts_sent", "drafts_accepted", "accepted_by_position"):
            assert warm[name] == without[name]
    assert second[1]["drafted_rounds"] == second[1]["rounds"] > 0
    assert 0 < second[1]["drafts_accepted"] < second[1]["drafts_sent"]
    assert second[1]["accepted_by_position"][-1] > 0
    assert (counters["prefix_hits"], counters["prefix_tokens"]) == (2, 256 + known)
    assert counters["prefix_bytes"] > 0
    assert none == {}
