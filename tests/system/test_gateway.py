"""The gateway with OpenAI's own client, in front of real processes."""

import json
import shutil
import socket
import urllib.error
import urllib.request

import openai
import pytest
from support.running import ROOT, System, wait_until

from common.sdk import Client

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

KEY, OTHER_KEY = "a-key-of-sixteen-characters", "another-key-of-somebody-else"
PROMPT = "import os\nimport sys\n\n\ndef main(argv):\n    "
TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if tools %}# tools: {{ tools | tojson }}\n{% endif %}def "
)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Served:
    """A running system with its gateway."""

    def __init__(self, folder):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        pair = ROOT / "common" / "demo" / "pair"
        shutil.copytree(pair / "target", folder / "pair-with-chat")
        (folder / "pair-with-chat" / "chat_template.jinja").write_text(TEMPLATE)
        keys = folder / "keys"
        keys.write_text(f"{KEY}\n{OTHER_KEY}\n")
        keys.chmod(0o600)
        self.system = System(
            DFLASH_MODEL_TARGET=str(folder / "pair-with-chat"),
            DFLASH_MODEL_DRAFTER=str(pair / "drafter"),
            DFLASH_TARGET_VERIFY_WIDTH="fixed",
            DFLASH_HTTP_KEY_FILE=str(keys),
        )
        self.system.start("--http", f"127.0.0.1:{self.port}")

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return answer.read().decode()

    def sessions(self):
        rows = json.loads(self.system.command("ps", "--json").stdout)["processes"]
        return sum(row["sessions"] for row in rows)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    made = Served(tmp_path_factory.mktemp("gateway"))
    try:
        yield made
    finally:
        made.system.stop()


@pytest.fixture(scope="module")
def api(served):
    with openai.OpenAI(base_url=served.url + "/v1", api_key=KEY, max_retries=0) as client:
        yield client


def test_a_completion_is_the_sdks(served, api):
    """The same target behind another door, drafted."""
    done = api.completions.create(
        model="pair-with-chat",
        prompt=PROMPT,
        max_tokens=48,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    with Client(run_dir=served.system.run_dir) as client:
        own = client.generate(PROMPT, max_tokens=48, ignore_eos=True)
    assert done.choices[0].text == own.text
    assert done.choices[0].finish_reason == "length"
    assert done.usage.completion_tokens == 48
    assert done.usage.total_tokens == done.usage.prompt_tokens + 48
    stats = done.model_extra["dflash_up"][0]
    assert stats["drafts_sent"] > stats["drafts_accepted"] > 0


def test_a_stream_says_what_the_whole_reply_says(api):
    """Chunks joined, with usage at the end, for two choices at once."""
    asked = {
        "model": "pair-with-chat",
        "messages": [{"role": "user", "content": "add two numbers"}],
        "max_tokens": 24,
        "seed": 11,
        "n": 2,
        "extra_body": {"ignore_eos": True},
    }
    whole = api.chat.completions.create(**asked)
    chunks = list(
        api.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    for choice in whole.choices:
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content
        assert mine[-1].finish_reason == choice.finish_reason == "length"
    assert whole.choices[0].message.content != whole.choices[1].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 48
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens > 0


def test_seed_stop_and_logprobs_are_honoured(api):
    """Same seed, same text; the stop string is no part of it; one entry per token."""
    asked = {"model": "pair-with-chat", "prompt": PROMPT, "max_tokens": 32, "seed": 3}
    first = api.completions.create(**asked, logprobs=2).choices[0]
    assert api.completions.create(**asked).choices[0].text == first.text
    assert len(first.logprobs.token_logprobs) == len(first.logprobs.tokens)
    assert all(len(top) == 2 for top in first.logprobs.top_logprobs)
    stop = first.text[3:5]
    stopped = api.completions.create(**asked, stop=stop).choices[0]
    assert stopped.text == first.text[: first.text.index(stop)]
    assert stopped.finish_reason == "stop"
    chat = api.chat.completions.create(
        model="pair-with-chat",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=4,
        logprobs=True,
        top_logprobs=3,
    )
    assert all(len(one.top_logprobs) == 3 for one in chat.choices[0].logprobs.content)


def test_tools_reach_the_template(api):
    """The prompt grows by what the template makes of them."""
    asked = {
        "model": "pair-with-chat",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 2,
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    without = api.chat.completions.create(**asked).usage.prompt_tokens
    assert api.chat.completions.create(**asked, tools=[tool]).usage.prompt_tokens > without


def test_prefixes_are_kept_for_each_key_apart(served, api):
    """The time of an answer would tell one caller what another has asked."""
    secret = list(range(100, 150))

    def cached(client, *more):
        asked = {"model": "pair-with-chat", "prompt": [*secret, *more], "max_tokens": 2}
        return client.completions.create(**asked).model_extra["dflash_up"][0]["cached_tokens"]

    assert cached(api) == 0
    assert cached(api, 200, 201) == len(secret)
    with openai.OpenAI(base_url=served.url + "/v1", api_key=OTHER_KEY, max_retries=0) as other:
        assert cached(other, 200, 201) == 0
        assert cached(other, 200, 201, 202) == len(secret) + 2


def test_errors_are_openais_own_classes(served, api):
    """Each names the parameter; a stream's error before its first token has its status too."""
    asked = {"model": "pair-with-chat", "prompt": "x"}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            api.completions.create(**asked, logit_bias={"99999": 1}, stream=stream)
        assert caught.value.param == "logit_bias"
    with pytest.raises(openai.BadRequestError, match="special token"):
        api.completions.create(model="pair-with-chat", prompt="a<eos>b")
    with pytest.raises(openai.BadRequestError) as caught:
        api.completions.create(**asked, max_tokens=100_000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="not served here"):
        api.completions.create(model="gpt-7", prompt="x")
    with openai.OpenAI(base_url=served.url + "/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        with pytest.raises(openai.AuthenticationError):
            stranger.completions.create(**asked)
    with pytest.raises(openai.APIStatusError) as caught:
        api.completions.create(
            **asked, max_tokens=3000, extra_body={"timeout_s": 0.05, "ignore_eos": True}
        )
    assert caught.value.status_code == 504


@pytest.mark.parametrize("stream", [True, False])
def test_a_caller_who_goes_away_frees_the_session(served, stream):
    """Within one round: the next caller wants the place."""
    body = {"prompt": PROMPT, "max_tokens": 3500, "stream": stream, "ignore_eos": True}
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as caller:
        caller.sendall(head.encode() + data)
        if stream:
            assert caller.recv(64).startswith(b"HTTP/1.1 200")
        wait_until(lambda: served.sessions() > 0, "the request runs")
    wait_until(lambda: served.sessions() == 0, "its session is freed", timeout_s=10.0)


def test_it_says_how_it_does(served, api):
    """For load balancers and for Prometheus; no key is asked for these."""
    assert json.loads(served.get("/health")) == {"status": "ok"}
    assert json.loads(served.get("/ready"))["targets"] == ["target.1"]
    metrics = served.get("/metrics")
    assert 'dflash_worker_up{worker="target.1"} 1.0' in metrics
    assert 'dflash_http_requests_total{route="/v1/completions",status="200"}' in metrics
    assert [model.id for model in api.models.list()] == ["pair-with-chat"]
    assert api.models.retrieve("pair-with-chat").owned_by == "dflash-up"
    with pytest.raises(urllib.error.HTTPError) as caught:
        served.get("/v1/nothing")
    with caught.value as answer:
        assert answer.code == 404


def test_it_can_be_restarted_while_the_system_runs(served):
    """The launcher knows it like every other process."""
    before = json.loads(served.system.command("ps", "--json").stdout)["processes"]
    assert [row["state"] for row in before if row["name"] == "gateway"] == ["ready"]
    served.system.command("restart", "gateway")
    wait_until(lambda: _answers(served), "the gateway answers again")
    after = json.loads(served.system.command("ps", "--json").stdout)["processes"]
    pids = [row["pid"] for rows in (before, after) for row in rows if row["name"] == "gateway"]
    assert pids[0] != pids[1]


def test_an_address_in_use_is_exit_code_4():
    """Two systems on one port: the second says so and leaves nothing behind."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        system = System()
        try:
            listen = f"127.0.0.1:{taken.getsockname()[1]}"
            done = system.command("up", "-d", "--wait=60", "--http", listen, check=False)
            assert done.returncode == 4
            assert "http.listen" in done.stderr
        finally:
            system.stop()


def _answers(served):
    try:
        return served.get("/health")
    except OSError:
        return False
