"""One system, many questions: drafted equals plain, prompts of every kind, the JSON it prints."""

import json

import pytest
from support.running import prompt_files, running

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def system():
    with running() as started:
        yield started


@pytest.fixture(scope="module")
def fixed_width():
    with running(DFLASH_TARGET_VERIFY_WIDTH="fixed", DFLASH_POLICY_MODE="fixed") as started:
        yield started


def proves_drafting(stats):
    """Rounds, drafts sent, some accepted and some rejected: plain is not compared with plain."""
    return stats["drafted_rounds"] > 0 and 0 < stats["drafts_accepted"] < stats["drafts_sent"]


def n_full_accepts(stats, block_size=8):
    """Rounds in which the last draft of a whole block was accepted."""
    by_position = stats["accepted_by_position"]
    return by_position[block_size - 2] if len(by_position) >= block_size - 1 else 0


def same_until_near_tie(drafted, plain):
    """Equal ids, or equal up to a first difference in a reply that reports near-ties."""
    if drafted["token_ids"] == plain["token_ids"]:
        return True
    return drafted["stats"]["near_ties"] + plain["stats"]["near_ties"] > 0


@pytest.mark.parametrize("path", prompt_files(), ids=lambda path: path.name)
def test_drafted_text_is_the_targets_own(system, path):
    """The promise of the system, on real text through real processes, policy adaptive."""
    drafted = system.generate("--ignore-eos", file=path, max_tokens=96)
    plain = system.generate("--ignore-eos", "--no-draft", file=path, max_tokens=96)

    assert drafted["stats"]["drafts_sent"] > 0
    assert plain["stats"]["drafts_sent"] == 0
    assert same_until_near_tie(drafted, plain)


def test_fixed_width_makes_drafted_and_plain_equal_outright(fixed_width):
    """With one width there is no near-tie to excuse a difference; full accepts happen too."""
    full_accepts = 0
    for path in prompt_files()[:5]:
        drafted = fixed_width.generate("--ignore-eos", file=path, max_tokens=96)
        plain = fixed_width.generate("--ignore-eos", "--no-draft", file=path, max_tokens=96)

        assert drafted["token_ids"] == plain["token_ids"], path.name
        assert proves_drafting(drafted["stats"])
        full_accepts += n_full_accepts(drafted["stats"])
    assert full_accepts


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
    """A silently ignored parameter would be a lie."""
    done = system.generate("--acceptance", "lucky", prompt="x", check=False)

    assert done.returncode == 2
    assert "acceptance" in done.stderr
    assert "lucky" in done.stderr


def test_sampled_text_depends_on_the_seed_alone(fixed_width):
    """Keyed noise: the same seed gives the same text, drafted or not; another seed another."""
    path = prompt_files()[0]
    asked = ("--ignore-eos", "--temperature", "0.8", "--top-p", "0.95", "--seed")

    drafted = fixed_width.generate(*asked, "7", file=path, max_tokens=64)
    plain = fixed_width.generate(*asked, "7", "--no-draft", file=path, max_tokens=64)
    other = fixed_width.generate(*asked, "8", file=path, max_tokens=64)

    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["token_ids"] != other["token_ids"]
    assert drafted["seed"] == 7
    assert 0 < drafted["stats"]["drafts_accepted"] < drafted["stats"]["drafts_sent"]
