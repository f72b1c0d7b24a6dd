"""OpenAI's parameters: honoured, harmless, or refused by name."""

import pytest

from common.errors import BadRequest, Busy, DFlashError, PeerLost, TooLong, Unsupported
from common.gateway.asked import Prompt, chat_of, text_of
from common.gateway.faults import HttpFault, body_of, fault_of, response_of
from common.sdk.options import sampling_of

CHAT = {"messages": [{"role": "user", "content": "x"}]}


def test_every_parameter_reaches_the_sampling():
    """One that is dropped on the way changes the output behind the user's back."""
    asked = text_of(
        {
            "prompt": "x",
            "max_tokens": 7,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.2,
            "frequency_penalty": 0.3,
            "logit_bias": {"4": -1},
            "seed": 9,
            "stop": ["a", "b"],
            "stop_ids": [3],
            "logprobs": 2,
            "acceptance": "cascade",
            "cascade_alpha": 0.5,
            "ignore_eos": True,
        }
    )
    sampling = sampling_of(asked.options)
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (7, 0.5, 0.9)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (5, 0.1, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.2, 0.3)
    assert (sampling.bias_ids, sampling.bias_values) == ((4,), (-1.0,))
    assert (sampling.seed, sampling.stop, sampling.stop_ids) == (9, ("a", "b"), (3,))
    assert (sampling.logprobs, sampling.acceptance, sampling.cascade_alpha) == (2, "cascade", 0.5)
    assert sampling.ignore_eos is True


def test_defaults_are_those_of_openai():
    """A program moved here must not become greedy, nor write a novel."""
    assert text_of({"prompt": "x"}).options["temperature"] == 1.0
    assert text_of({"prompt": "x"}).options["max_tokens"] == 16
    assert chat_of(CHAT).options["temperature"] == 1.0


def test_null_counts_as_not_given():
    """Client libraries send it for what their caller left out."""
    assert chat_of(CHAT | {"stop": None, "suffix": None, "seed": None}) == chat_of(CHAT)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", (Prompt(text="a"),)),
        (["a", "b"], (Prompt(text="a"), Prompt(text="b"))),
        ([1, 2], (Prompt(ids=(1, 2)),)),
        ([[1], [2, 3]], (Prompt(ids=(1,)), Prompt(ids=(2, 3)))),
    ],
)
def test_all_four_kinds_of_prompt(prompt, prompts):
    """As the API reference lists them."""
    assert text_of({"prompt": prompt}).prompts == prompts


@pytest.mark.parametrize(
    ("read", "body", "kind", "sentence"),
    [
        (text_of, {}, BadRequest, "prompt: missing"),
        (text_of, {"prompt": []}, BadRequest, "prompt: "),
        (text_of, {"prompt": [1, "a"]}, BadRequest, "prompt: "),
        (text_of, {"prompt": "x", "echo": True}, Unsupported, "echo: True"),
        (text_of, {"prompt": "x", "suffix": "y"}, Unsupported, "suffix: 'y'"),
        (text_of, {"prompt": "x", "best_of": 2}, Unsupported, "best_of: 2"),
        (text_of, {"prompt": "x", "messages": []}, Unsupported, "messages: "),
        (text_of, {"prompt": "x", "n": 0}, BadRequest, "n: 0"),
        (text_of, {"prompt": "x", "n": 129}, BadRequest, "n: 129"),
        (text_of, {"prompt": "x", "stream": 1}, BadRequest, "stream: 1"),
        (text_of, {"prompt": "x", "stop": 3}, BadRequest, "stop: 3"),
        (text_of, {"prompt": "x", "logit_bias": [1]}, BadRequest, "logit_bias: "),
        (text_of, {"prompt": "x", "logit_bias": {"a": 1}}, BadRequest, "logit_bias: "),
        (text_of, {"prompt": "x", "stream_options": {}, "model": 3}, BadRequest, "model: 3"),
        (chat_of, {}, BadRequest, "messages: missing"),
        (chat_of, CHAT | {"tool_choice": "required"}, Unsupported, "tool_choice: 'required'"),
        (chat_of, CHAT | {"response_format": {"type": "json"}}, Unsupported, "response_format"),
        (chat_of, CHAT | {"temprature": 1}, Unsupported, "temprature: there is no such"),
        (chat_of, CHAT | {"top_logprobs": 2}, BadRequest, "top_logprobs: it needs"),
        (chat_of, CHAT | {"tools": {}}, BadRequest, "tools: "),
        (
            chat_of,
            CHAT | {"stream_options": {"include_usage": True}},
            BadRequest,
            "stream_options: it needs",
        ),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(read, body, kind, sentence):
    """A parameter that is ignored is a wrong answer."""
    with pytest.raises(kind, match=sentence):
        read(body)


@pytest.mark.parametrize(
    ("error", "status", "param", "code"),
    [
        (BadRequest("bias_ids: 99 is outside"), 400, "logit_bias", None),
        (BadRequest("messages[0].content: it holds"), 400, "messages", None),
        (BadRequest("template_kwargs.note: it holds"), 400, "chat_template_kwargs", None),
        (BadRequest("prompt_ids: every id"), 400, "prompt", None),
        (Unsupported("echo: True is not"), 400, "echo", "unsupported"),
        (TooLong("prompt of 9 tokens"), 400, None, "context_length_exceeded"),
        (Busy("full", 2.5), 429, None, "busy"),
        (PeerLost("gone"), 503, None, "unavailable"),
        (DFlashError("x"), 500, None, "error"),
        (ValueError("secret inside"), 500, None, "internal"),
        (
            HttpFault(404, "no", param="model", code="model_not_found"),
            404,
            "model",
            "model_not_found",
        ),
    ],
)
def test_errors_have_openais_shape(error, status, param, code):
    """Client libraries choose their exception by status and read these four keys."""
    fault = fault_of(error)
    body = body_of(fault)["error"]
    assert (fault.status, body["param"]) == (status, param)
    assert set(body) == {"message", "type", "param", "code"}
    assert code in (body["code"], None) or isinstance(error, DFlashError)
    assert "secret" not in body["message"]


def test_a_full_queue_says_when_to_come_back():
    """Whole seconds, at least one."""
    assert response_of(Busy("full", 2.5)).headers["Retry-After"] == "3"
    assert response_of(Busy("full", 0.01)).headers["Retry-After"] == "1"
