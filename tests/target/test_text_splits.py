"""Streamed text is the text, for every tokenizer, every split, and bytes that are none."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from common.settings import PAIR_DIR
from target_svc.stops import StopStrings
from target_svc.text import Detokenizer, load_tokenizer

MARK = "\ufffd"
TEXTS = {
    "joined emoji": "family 👨‍👩‍👧‍👦 flag 🏳️‍🌈 skin 👍🏽!",
    "combining marks": "e\u0301a\u0308o\u0328\u0301 Z̷a̸l̶g̵o̴",
    "CJK": "你好世界。日本語のテキスト、한국어",
    "mixed": "naïve ☃ 🚀🚀 café\n\tx = '你'\r\n",
    "a real mark": f"before {MARK} after{MARK}",
    "real marks in a row": f"a{MARK}{MARK}{MARK}你 {MARK}🚀",
    "right to left": "שלום עולם مرحبا",
    "spaces": "  a  b   \n\n  c ",
}
BYTES = [
    b"\xff\xfe\xff\xe2\x82\xac!",
    b"ok \xe2\x82 then",
    b"\xf0\x9f\x98",
    b"\x80\x80\x80\x80\x80\x80a",
    b"\xe4\xb8\xad\xe6\x96\x87\xe2\x82",
    b"\xc3",
    bytes(range(128, 256)) + b" end",
]


def byte_level():
    """One token per byte, as GPT-2 spells them."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    vocab = {letter: index for index, letter in enumerate(sorted(letters))}
    made = Tokenizer(models.BPE(vocab, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def byte_fallback():
    """Letters where there are some, bytes for the rest, spaces as SentencePiece writes them."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for letter in "▁abcdefghijklmnopqrstuvwxyz!.,'=":
        vocab[letter] = len(vocab)
    made = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token=None))
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


def ids_of_bytes(kind, data):
    """Ids that spell any bytes, UTF-8 or not."""
    made = KINDS[kind]
    if kind == "byte level":
        table = letters_of_bytes()
        return [made.token_to_id(table[byte]) for byte in data]
    ids = []
    for byte in data:
        letter = "▁" if byte == 32 else chr(byte)
        known = made.token_to_id(letter) if byte < 128 else None
        ids.append(byte if known is None else known)
    return ids


def letters_of_bytes():
    """The letter that stands for each byte in byte-level tokenizers."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {byte: chr(byte) for byte in keep}, 0
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + extra)
            extra += 1
    return table


KINDS = {"byte level": byte_level(), "byte fallback": byte_fallback()}


def streamed(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in ids]
    return pieces, detokenizer.finish()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_text_streams_exactly_once_and_no_mark_is_shown_for_half_a_character(kind, text):
    """Every character may be spelled by as many tokens as it has bytes."""
    ids = ids_of_bytes(kind, text.encode())
    pieces, tail = streamed(KINDS[kind], ids)
    whole = KINDS[kind].decode(ids, skip_special_tokens=False)
    assert (
        "".join(pieces) + tail
        == whole
        == (text if kind == "byte level" else text.removeprefix(" "))
    )
    assert whole.count(MARK) == sum(piece.count(MARK) for piece in pieces) + tail.count(MARK)


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.one_of(st.text(max_size=40), st.text(f"{MARK}{MARK}{MARK}你🚀 a", min_size=8)))
@settings(max_examples=150, deadline=None)
def test_any_text_streams_exactly_once(kind, text):
    """Text shown twice, lost, or shown as marks first."""
    ids = ids_of_bytes(kind, text.encode())
    pieces, tail = streamed(KINDS[kind], ids)
    assert "".join(pieces) + tail == KINDS[kind].decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("data", BYTES, ids=repr)
def test_bytes_that_are_no_text_become_what_the_decoder_says(data):
    """In the middle of a run, a character that is whole must not be lost."""
    ids = ids_of_bytes("byte level", data)
    pieces, tail = streamed(KINDS["byte level"], ids)
    assert "".join(pieces) + tail == data.decode("utf-8", errors="replace")


@given(data=st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_bytes_become_what_the_decoder_says(data):
    """A model may write any bytes at a high temperature."""
    ids = ids_of_bytes("byte level", data)
    pieces, tail = streamed(KINDS["byte level"], ids)
    assert "".join(pieces) + tail == KINDS["byte level"].decode(ids, skip_special_tokens=False)


@given(data=st.binary(max_size=60))
@settings(max_examples=200, deadline=None)
def test_what_a_fallback_decoder_takes_back_is_not_shown_twice(data):
    """It shows marks for a whole run of bytes; what was shown stays, and letters never get lost."""
    ids = ids_of_bytes("byte fallback", data)
    pieces, tail = streamed(KINDS["byte fallback"], ids)
    shown = "".join(pieces) + tail
    letters = [c for c in data.decode("latin-1") if c in "abcdefghijklmnopqrstuvwxyz"]
    assert [c for c in shown if c in "abcdefghijklmnopqrstuvwxyz"] == letters


@pytest.mark.parametrize("length", [200, 400])
def test_a_long_run_of_wrong_bytes_costs_no_more_per_byte(length):
    """Decoding all of it again for every byte would make a long reply stand still."""
    seen = []

    class Counting:
        def decode(self, ids, skip_special_tokens):
            seen.append(len(ids))
            return KINDS["byte level"].decode(ids, skip_special_tokens=skip_special_tokens)

        def id_to_token(self, token):
            return KINDS["byte level"].id_to_token(token)

    ids = ids_of_bytes("byte level", b"\xff" * length)
    pieces, tail = streamed(Counting(), ids)
    assert "".join(pieces) + tail == MARK * length
    assert max(seen) <= 130


@pytest.mark.parametrize("stop", ["世界", "👩", MARK, "\n\t", "é"])
def test_stop_strings_see_whole_characters(stop):
    """A stop string is compared with text, however its characters were split."""
    text = f"a 👨‍👩‍👧 你好世界 caf\u00e9 {MARK}\n\tb"
    detokenizer, stops = Detokenizer(KINDS["byte level"]), StopStrings([stop])
    out = []
    for token in ids_of_bytes("byte level", text.encode()):
        shown = stops.push(detokenizer.push(token))
        out.append(shown.text)
        if shown.is_stopped:
            break
    assert "".join(out) == text[: text.index(stop)]


@given(text=st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_the_embedded_pairs_own_tokenizer(text):
    """The one that every newcomer sees."""
    tokenizer = load_tokenizer(PAIR_DIR / "target")
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces, tail = streamed(tokenizer, ids)
    assert "".join(pieces) + tail == tokenizer.decode(ids, skip_special_tokens=False)
