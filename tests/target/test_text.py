"""Text in and out: pieces join to the whole, and never split a character."""

import pytest
from support.tiny import make_tokenizer

from target_svc.text import Detokenizer, encode, load_tokenizer

TEXTS = ["def f(x):\n    return x + 1\n", "naïve café — ☃ 🚀🚀 \u4f60\u597d", "", "  \n\n  x"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The tiny byte-level BPE, read the way a target's is."""
    folder = tmp_path_factory.mktemp("text")
    make_tokenizer(512).save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text(tokenizer, text):
    """A character cut in two, or text shown twice."""
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in encode(tokenizer, text)]
    assert "".join(pieces) + detokenizer.finish() == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_half_a_character_waits(tokenizer):
    """Three replacement marks in front of the user, then the snowman."""
    detokenizer = Detokenizer(tokenizer)
    ids = encode(tokenizer, "☃")
    assert len(ids) == 3
    assert [detokenizer.push(token) for token in ids] == ["", "", "☃"]


def test_a_character_that_never_completes_is_shown_at_the_end(tokenizer):
    """Text lost when a reply stops in the middle of a character."""
    detokenizer = Detokenizer(tokenizer)
    first, second, _ = encode(tokenizer, "☃")
    assert detokenizer.push(first) + detokenizer.push(second) == ""
    assert detokenizer.finish() == "\ufffd"


def test_bytes_that_are_no_text_do_not_hold_back_for_ever(tokenizer):
    """A stream that goes silent after one wrong byte."""
    detokenizer = Detokenizer(tokenizer)
    continuation = encode(tokenizer, "☃")[1]
    shown = "".join(detokenizer.push(continuation) for _ in range(8))
    assert shown
    assert detokenizer.push(encode(tokenizer, "a")[0]).endswith("a")


def test_special_tokens_in_a_prompt_stay_text(tokenizer):
    """A prompt that ends the text it is part of."""
    ids = encode(tokenizer, "<|endoftext|>")
    assert 7 not in ids
    assert len(ids) > 1
