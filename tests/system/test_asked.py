"""What a client can ask for, through real processes on the embedded pair, drafted and plain."""

import json
import shutil

import pytest
from support.running import ROOT, prompt_files, prompt_of, running

from common.sdk import BadRequest, Client, ProgressEvent, TokenEvent, Unsupported

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

PROMPT = prompt_of(prompt_files()[3])[-900:]  # short: it is prefilled some sixty times
TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if tools %}# tools: {{ tools | tojson }}\n{% endif %}def "
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The embedded target, with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "target"
    shutil.copytree(ROOT / "common" / "demo" / "pair" / "target", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def system(target):
    environ = {"DFLASH_TARGET_VERIFY_WIDTH": "fixed", "DFLASH_POLICY_MODE": "fixed"}
    drafter = ROOT / "common" / "demo" / "pair" / "drafter"
    models = {"DFLASH_MODEL_TARGET": str(target), "DFLASH_MODEL_DRAFTER": str(drafter)}
    with running(**environ, **models) as started:
        yield started


@pytest.fixture(scope="module")
def client(system):
    with Client(run_dir=system.run_dir, timeout_s=60) as made:
        yield made


def ask(client, **options):
    return client.generate(PROMPT, **{"max_tokens": 64, "ignore_eos": True, "seed": 5} | options)


def both(client, **options):
    """Drafted and plain, with proof that drafts were kept and rejected."""
    drafted, plain = ask(client, **options), ask(client, draft=False, **options)
    stats = drafted.stats
    assert stats["drafted_rounds"] > 0
    assert 0 < stats["drafts_accepted"] < stats["drafts_sent"]
    assert plain.stats["drafts_sent"] == 0
    return drafted, plain


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.6, "frequency_penalty": 0.4},
        {"logit_bias": {13: -100.0, 200: 2.0}},
        {"temperature": 0.8, "min_p": 0.05},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "frequency_penalty": 0.3},
    ],
    ids=str,
)
def test_drafts_change_nothing_whatever_is_asked(client, options):
    """Penalties at row i count the drafts before it; counted otherwise the outputs part."""
    drafted, plain = both(client, **options)
    assert drafted.token_ids == plain.token_ids
    assert drafted.text == plain.text
    assert drafted.token_ids != ask(client, draft=False).token_ids  # the option does something
    assert drafted.stats["lossy"] is False


def test_log_probabilities_are_the_same_drafted_and_plain(client):
    """Chosen and most likely ones come from the row that decided."""
    drafted, plain = both(client, logprobs=3)
    assert len(drafted.logprobs) == len(drafted.token_ids) == 64
    for token, one, other in zip(drafted.token_ids, drafted.logprobs, plain.logprobs, strict=True):
        assert one.top[0] == (token, pytest.approx(one.chosen))  # greedy
        assert [i for i, _ in one.top] == [i for i, _ in other.top]
        assert one.chosen == pytest.approx(other.chosen, abs=1e-4)
        assert 0 >= one.top[0][1] >= one.top[1][1] >= one.top[2][1]
    assert ask(client, max_tokens=4).logprobs == ()


@pytest.mark.parametrize("acceptance", ["residual", "typical", "cascade"])
def test_other_acceptances_keep_drafts_and_say_what_they_are(client, acceptance):
    """A lossy reply that does not say so is taken for the target's own."""
    reply = ask(client, temperature=0.8, acceptance=acceptance)
    assert reply.stats["drafts_accepted"] > 0
    assert reply.stats["acceptance"] == acceptance
    assert reply.stats["lossy"] is (acceptance != "residual")
    assert len(reply.token_ids) == 64  # which ones may depend on what was drafted in time


@pytest.mark.parametrize("draft", [True, False])
@pytest.mark.parametrize("length", [1, 5])
def test_text_ends_before_a_stop_string_wherever_it_falls(client, draft, length):
    """In a block, over the edge of two, in the first token: never late, never twice."""
    whole = ask(client, max_tokens=48).text
    for at in (0, 7, 41):
        stop = whole[at : at + length]
        reply = ask(client, max_tokens=48, stop=stop, draft=draft)
        assert reply.finish_reason == "stop"
        assert reply.text == whole[: whole.index(stop)]
        assert len(reply.token_ids) == reply.n_tokens <= 48


def test_text_ends_before_a_stop_token_wherever_it_falls(client):
    """As an accepted draft, as the bonus, as the very first token."""
    whole = ask(client, max_tokens=48).token_ids
    for at in (0, 1, 2, 4, 7, 30):
        stop = whole[at]
        reply = ask(client, max_tokens=48, stop_ids=[stop])
        assert reply.token_ids == whole[: whole.index(stop)]
        assert reply.finish_reason == "stop"


def test_streamed_text_is_the_text(client):
    """Every piece once, in order, with what was held back at the end."""
    with client.stream(PROMPT, max_tokens=40, stop=["zzzz", "\n\n\n\n"], ignore_eos=True) as stream:
        events = list(stream)
    assert isinstance(events[0], ProgressEvent)
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    assert "".join(event.text for event in tokens) + events[-1].text == stream.completion.text


def test_completions_side_by_side_have_seeds_of_their_own(client):
    """The first is the request's own."""
    options = {"max_tokens": 24, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    replies = client.generate_n(3, PROMPT, **options)
    assert replies[0].token_ids == client.generate(PROMPT, **options).token_ids
    assert len({reply.seed for reply in replies}) == 3
    assert len({reply.token_ids for reply in replies}) == 3


def test_a_chat_is_what_its_rendered_text_is(client):
    """The template is the target's own; tools pass through it."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [{"role": "user", "content": "add two numbers"}]
    rendered = f"# user: add two numbers\n# tools: {json.dumps(tools)}\ndef "
    options = {"max_tokens": 24, "ignore_eos": True}
    chat = client.generate(messages=messages, tools=tools, **options)
    assert chat.token_ids == client.generate(rendered, **options).token_ids


def test_what_the_model_cannot_do_is_refused_by_name(client):
    """Each names what, the value, and what would be right."""
    with pytest.raises(BadRequest, match=r"special token .*allow_special"):
        client.generate("a<eos>b", max_tokens=4)
    with pytest.raises(BadRequest, match=r"messages\[0\]\.content: .*special token"):
        client.generate(messages=[{"role": "user", "content": "<eos>"}], max_tokens=4)
    with pytest.raises(BadRequest, match="bias_ids: 99999"):
        client.generate("x", max_tokens=4, logit_bias={99999: 1.0})
    with pytest.raises(BadRequest, match="stop_ids: 99999"):
        client.generate("x", max_tokens=4, stop_ids=[99999])
    allowed = client.generate("a<eos>b", max_tokens=4, allow_special=True)
    assert allowed.n_tokens <= 4


def test_the_command_line_has_the_same_options(system):
    """A flag that is dropped on the way changes nothing and says nothing."""
    flags = ["--logprobs", "2", "--stop", "\n", "--min-p", "0.1", "--presence-penalty", "0.5"]
    body = json.loads(system.command("generate", "def f(", "--json", "--chat", *flags).stdout)
    assert "\n" not in body["text"]
    assert len(body["logprobs"]) == len(body["token_ids"])
    assert all(len(one["top"]) == 2 for one in body["logprobs"])


def test_a_model_without_a_template_refuses_a_chat():
    """Another system: the embedded pair has none."""
    with running() as started, Client(run_dir=started.run_dir, timeout_s=60) as client:
        with pytest.raises(Unsupported, match="no chat template"):
            client.generate(messages=[{"role": "user", "content": "x"}], max_tokens=4)
        assert client.generate("x", max_tokens=2, ignore_eos=True).n_tokens == 2
