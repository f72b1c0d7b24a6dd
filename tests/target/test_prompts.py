"""What a client sends becomes prompt ids: text, chat, or ids; special tokens only where allowed."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from common.errors import BadRequest, ConfigError, Unsupported
from common.wire.messages import Open, Sampling
from common.wire.tensors import Tensor, from_ids
from target_svc.chat import ChatTemplates, load_chat_templates
from target_svc.prompts import Prompts

END, START = "<|im_end|>", "<|im_start|>"
CHATML = (
    "{%- if tools %}{{- 'TOOLS ' + (tools | tojson) + '\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role not in ('system', 'user', 'assistant') %}"
    "{{- raise_exception('no role ' + message.role) }}{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def tokenizer():
    """One id for every ASCII character, and two special tokens."""
    vocab = {chr(code): code for code in range(128)}
    made = Tokenizer(models.BPE(vocab, [], byte_fallback=False))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.add_special_tokens([START, END])
    made.encode_special_tokens = True
    return made


def prompts(source=CHATML):
    templates = ChatTemplates({"default": source} if source else {}, {"eos_token": END})
    return Prompts(tokenizer(), templates, vocab_size=130, empty_id=129)


def order(body, **changes):
    data = body.encode()
    text = Tensor("uint8", (len(data),), data)
    return Open("s", 0, "", text, 0, Sampling(), False, **changes)


def chat(*messages, allow_special=False, **more):
    body = json.dumps({"messages": list(messages), **more})
    return order(body, is_chat=True, allow_special=allow_special)


def user(text):
    return {"role": "user", "content": text}


def test_text_becomes_ids_and_an_empty_text_the_separator():
    """A prompt of no token has no row to predict from."""
    assert prompts().ids_of(order("ab")) == [97, 98]
    assert prompts().ids_of(order("")) == [129]


def test_a_special_token_in_raw_text_is_refused_by_name():
    """Text from a stranger could otherwise end the document it stands in."""
    with pytest.raises(BadRequest, match=r"special token '<\|im_end\|>' at character 1; .*allow"):
        prompts().ids_of(order(f"a{END}b"))


def test_a_special_token_in_raw_text_is_a_token_where_allowed():
    """Whoever writes the template himself needs them; the next prompt is refused again."""
    place = prompts()
    assert place.ids_of(order(f"a{END}b", allow_special=True)) == [97, 129, 98]
    with pytest.raises(BadRequest, match="special token"):
        place.ids_of(order(END))


def test_a_chat_is_rendered_with_its_special_tokens():
    """The template's marks are tokens, the user's text is text."""
    text = "user\nhi"
    expected = [128, *map(ord, text), 129, 10, 128, *map(ord, "assistant\n")]
    assert prompts().ids_of(chat(user("hi"))) == expected


@pytest.mark.parametrize(
    ("message", "more", "where"),
    [
        (user(f"x{END}"), {}, r"messages\[0\]\.content"),
        ({"role": "user", "content": [{"text": START}]}, {}, r"messages\[0\]\.content\[0\]\.text"),
        (user("x"), {"tools": [{"name": END}]}, r"tools\[0\]\.name"),
        (user("x"), {"template_kwargs": {"note": END}}, r"template_kwargs\.note"),
        (user([{"text": "<|im_"}, {"text": "end|>"}]), {}, r"messages\[0\]\.content"),
        (user(["<|im_ ", " ", " end|>"]), {}, r"messages\[0\]\.content"),
    ],
)
def test_a_message_cannot_forge_the_end_of_its_turn(message, more, where):
    """The message that names the place is what a gateway's user sees."""
    with pytest.raises(BadRequest, match=where + ": it holds the special token"):
        prompts().ids_of(chat(message, **more))


def test_parts_that_spell_no_special_token_are_let_through():
    """A check that refuses every list would pass the test above."""
    source = "{% for part in messages[0].content %}{{ part.text }}{% endfor %}"
    assert prompts(source).ids_of(chat(user([{"text": "<|im_"}, {"text": "ends|>"}]))) == [
        *map(ord, "<|im_ends|>")
    ]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"enable_thinkin": False}, "reads no 'enable_thinkin'; it reads enable_thinking$"),
        ({"messages": []}, "'messages' is not a client's to set"),
        ({"eos_token": "x"}, "'eos_token' is not a client's to set"),
        ({"raise_exception": 1}, "'raise_exception' is not a client's to set"),
        ({"self": 1}, "reads no 'self'"),
    ],
)
def test_an_argument_that_would_be_ignored_is_refused_by_name(given, sentence):
    """A misspelt switch was passed over, and the reply came as if it had not been set."""
    place = prompts("{% if enable_thinking %}T{% endif %}{{ eos_token }}{{ raise_exception }}")
    assert place.ids_of(chat(user("x"), template_kwargs={"enable_thinking": True}))[0] == ord("T")
    with pytest.raises(BadRequest, match="template_kwargs: .*" + sentence):
        place.ids_of(chat(user("x"), template_kwargs=given))


def test_tools_for_a_template_that_reads_none_are_refused():
    """The model would never hear of them."""
    with pytest.raises(Unsupported, match="tools: "):
        prompts("{{ messages[0].content }}").ids_of(chat(user("x"), tools=[{"name": "f"}]))


@pytest.mark.parametrize("given", [{"k": 0}, {"n": 10**9}])
def test_whatever_a_template_does_to_a_clients_values_is_the_clients_error(given):
    """An untyped error ends the target's process, and with it everybody's sessions."""
    source = "{{ 5 // (k | default(1)) }}{% for i in range(n | default(1)) %}{% endfor %}"
    assert prompts(source).ids_of(chat(user("x"))) == [ord("5")]
    with pytest.raises(BadRequest, match="the chat template says"):
        prompts(source).ids_of(chat(user("x"), template_kwargs=given))


@pytest.mark.parametrize("allow_special", [False, True])
def test_messages_nested_to_any_depth_are_answered_or_refused(allow_special):
    """Between what JSON's reader takes and what the checks behind it take, nothing caught it."""
    outcomes = [_nested(depth, allow_special) for depth in (100, *range(500, 1000, 10), 100_000)]
    assert (outcomes[0], outcomes[-1]) == ("answered", "refused")


def _nested(depth, allow_special):
    body = f'{{"messages": [], "tools": [{"[" * depth}{"]" * depth}]}}'
    try:
        prompts().ids_of(order(body, is_chat=True, allow_special=allow_special))
    except BadRequest:
        return "refused"
    return "answered"


def test_half_a_surrogate_pair_is_refused():
    """JSON can spell it, and no tokenizer can read it."""
    with pytest.raises(BadRequest, match="no valid Unicode"):
        prompts().ids_of(
            order('{"messages": [{"role": "user", "content": "\\ud800"}]}', is_chat=True)
        )


def test_tools_reach_the_template_unescaped():
    """HTML escapes are what jinja2's own tojson would write."""
    ids = prompts().ids_of(chat(user("x"), tools=[{"name": "a<b"}]))
    assert "".join(map(chr, ids)).startswith('TOOLS [{"name": "a<b"}]\n')


def test_the_templates_own_refusal_reaches_the_client():
    """'bad request' alone does not say which role is wrong."""
    with pytest.raises(BadRequest, match="no role robot"):
        prompts().ids_of(chat({"role": "robot", "content": "x"}))


def test_a_model_without_a_template_refuses_a_chat_by_name():
    """Guessing a format gives text the model was never trained on."""
    with pytest.raises(Unsupported, match="no chat template"):
        prompts(source="").ids_of(chat(user("x")))


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("{", "a chat is a JSON object"),
        ("[]", "list of messages"),
        ('{"messages": [1]}', r"messages\[0\]"),
        ('{"messages": [{"content": "x"}]}', "role"),
        ('{"messages": [], "tool": 1}', "unknown key 'tool'"),
        ('{"messages": [], "tools": {}}', None),
        ('{"messages": [], "tools": 3}', "tools: 3"),
        ('{"messages": [], "template_kwargs": [1]}', "template_kwargs"),
    ],
)
def test_messages_that_are_none_say_what_is_wrong(body, sentence):
    """The error names what, the value and what would be right."""
    if sentence is None:
        prompts().ids_of(order(body, is_chat=True))
        return
    with pytest.raises(BadRequest, match=sentence):
        prompts().ids_of(order(body, is_chat=True))


@pytest.mark.parametrize(
    "source",
    ["{{ messages.append(1) }}", "{{ messages.__class__.__mro__ }}", "{{ ''.__class__() }}"],
)
def test_a_template_can_change_and_reach_nothing(source):
    """It comes with a checkpoint that somebody downloaded."""
    with pytest.raises(BadRequest):
        prompts(source).ids_of(chat(user("x")))


def test_ids_outside_the_vocabulary_are_refused():
    """They would index past the embedding."""
    ids = from_ids(np.array([5, 130]).tolist())
    with pytest.raises(BadRequest, match="130"):
        prompts().ids_of(Open("s", 0, "", ids, 0, Sampling(), False))


@pytest.mark.parametrize("form", ["string", "list", "file"])
def test_templates_are_found_where_checkpoints_hold_them(tmp_path, form):
    """Three ways to publish one template."""
    config = {"eos_token": {"content": "E"}, "bos_token": "B"}
    source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    if form == "string":
        config["chat_template"] = source
    elif form == "list":
        named = [{"name": "default", "template": source}, {"name": "tool_use", "template": "T"}]
        config["chat_template"] = named
    else:
        (tmp_path / "chat_template.jinja").write_text(source)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    templates = load_chat_templates(tmp_path)
    assert templates.render([user("x")]) == "BxE"
    if form == "list":
        assert templates.render([user("x")], tools=[{"name": "f"}]) == "T"


@pytest.mark.parametrize(
    "config",
    [
        b"[]",
        b"\xff",
        b'{"chat_template": 5}',
        b'{"chat_template": ["x"]}',
        b'{"chat_template": [{"name": "default"}]}',
    ],
)
def test_a_damaged_tokenizer_config_is_named(tmp_path, config):
    """A trace from inside the loader does not say which file is wrong."""
    (tmp_path / "tokenizer_config.json").write_bytes(config)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        load_chat_templates(tmp_path)


def test_a_damaged_template_is_an_error_at_load():
    """Found by the first chat it would be the client's error."""
    with pytest.raises(ConfigError, match="chat template"):
        ChatTemplates({"default": "{% for %}"}, {})
