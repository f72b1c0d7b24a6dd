"""One system, many questions: drafted equals plain, prompts of every kind, the JSON it prints."""

import json

import pytest
from support.running import head_of, prompt_files, running

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def system():
    with running() as started:
        yield started


@pytest.fixture(scope="module")
def fixed_width():
    with running(DFLASH_TARGET_VERIFY_WIDTH="fixed") as started:
        yield started


def proves_drafting(stats):
    """An equality test must not compare plain with plain."""
    rejected = (
        sum(n for rows, n in stats["rows_histogram"].items() if int(rows) > 1)
        and stats["drafts_accepted"] < stats["drafts_sent"]
    )
    return stats["drafted_rounds"] > 0 and stats["drafts_accepted"] > 0 and bool(rejected)


def same_until_near_tie(drafted, plain):
    """Equal ids, or equal up to a first difference in a reply that reports near-ties."""
    if drafted["token_ids"] == plain["token_ids"]:
        return True
    return drafted["stats"]["near_ties"] + plain["stats"]["near_ties"] > 0


@pytest.mark.parametrize("path", prompt_files(), ids=lambda path: path.name)
def test_drafted_text_is_the_targets_own(system, tmp_path, path):
    """The promise of the system, on real text through real processes."""
    prompt = tmp_path / "prompt.py"
    prompt.write_text(head_of(path))

    drafted = system.generate(file=prompt, max_tokens=96)
    plain = system.generate("--no-draft", file=prompt, max_tokens=96)

    assert proves_drafting(drafted["stats"]), drafted["stats"]
    assert plain["stats"]["drafts_sent"] == 0
    assert same_until_near_tie(drafted, plain)


def test_fixed_width_makes_drafted_and_plain_equal_outright(fixed_width, tmp_path):
    """With one width there is no near-tie to excuse a difference; full accepts happen too."""
    full_accepts = rejections = 0
    for path in prompt_files()[:4]:
        prompt = tmp_path / "prompt.py"
        prompt.write_text(head_of(path))

        drafted = fixed_width.generate(file=prompt, max_tokens=96)
        plain = fixed_width.generate("--no-draft", file=prompt, max_tokens=96)

        assert drafted["token_ids"] == plain["token_ids"], path.name
        assert proves_drafting(drafted["stats"])
        by_position = drafted["stats"]["accepted_by_position"]
        full_accepts += int(
            by_position[-1].split("/")[0] if isinstance(by_position[-1], str) else 1
        )
        rejections += drafted["stats"]["drafts_sent"] - drafted["stats"]["drafts_accepted"]
    assert full_accepts
    assert rejections


def test_json_holds_what_the_documentation_lists(system):
    """Scripts read these keys."""
    reply = system.generate(prompt="def fibonacci(n):\n", max_tokens=24)

    assert set(reply) >= {"text", "token_ids", "finish_reason", "seed", "stats"}
    assert set(reply["stats"]) >= {
        "rounds",
        "drafted_rounds",
        "plain_rounds",
        "drafts_sent",
        "drafts_accepted",
        "acceptance_length",
        "accepted_by_position",
        "rows_histogram",
        "tokens_per_s",
        "ttft_s",
        "near_ties",
    }
    assert len(reply["token_ids"]) == 24
    assert reply["finish_reason"] == "length"


def test_text_is_printed_whole_without_json(system):
    """The plain form prints the completion and nothing else on standard output."""
    arguments = ("generate", "import os\nimport ", "--max-tokens", "12")

    shown = system.command(*arguments).stdout
    reply = json.loads(system.command(*arguments, "--json").stdout)

    assert reply["text"] in shown


@pytest.mark.parametrize("prompt", ["", "x"], ids=["empty", "one-token"])
def test_shortest_prompts_are_answered(system, prompt):
    """An empty prompt is the start of a document, not a crash."""
    reply = system.generate(prompt=prompt, max_tokens=8)

    assert reply["finish_reason"] in ("length", "stop")


def test_prompt_longer_than_the_context_names_both_numbers(system, tmp_path):
    """The user must learn how much would fit."""
    long = tmp_path / "long.py"
    long.write_text("value = compute(value)\n" * 3000)

    done = system.generate(file=long, check=False)

    assert done.returncode == 2
    assert "context" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_file_that_is_not_utf8_is_one_line_with_exit_2(system, tmp_path):
    """A traceback is no answer."""
    broken = tmp_path / "broken.py"
    broken.write_bytes(b"import os\n\xff\xfe\n")

    done = system.generate(file=broken, check=False)

    assert done.returncode == 2
    assert "UTF-8" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_file_not_found_is_one_line_with_exit_2(system, tmp_path):
    """The path is named."""
    done = system.generate(file=tmp_path / "absent.py", check=False)

    assert done.returncode == 2
    assert "absent.py" in done.stderr


def test_parameter_that_is_not_honoured_is_refused_by_name(system):
    """A silently ignored temperature would be a lie."""
    done = system.generate("--temperature", "0.7", prompt="x", check=False)

    assert done.returncode == 2
    assert "temperature" in done.stderr
    assert "0.7" in done.stderr
