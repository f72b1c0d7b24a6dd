"""One valid message of every class, and hypothesis strategies for them."""

import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path

from hypothesis import strategies as st

from common.wire.messages import (
    TYPE_NUMBERS,
    Block,
    Features,
    Hello,
    ModelCard,
    RoundKey,
    Sampling,
    Submit,
    Tokens,
    Verified,
    Verify,
)
from common.wire.tensors import Tensor, from_ids, from_text

KEY = RoundKey("s-1", 1, 5, 1000, 77, 9)
CARD = ModelCard("qwen4_exp", 4096, 256, 4096, 16, 128, (1, 3), "stream_mean", *"abcde")
GOLDEN = Path(__file__).parent.parent / "golden" / "frames"
NAMED = {
    "hello_with_card": Hello("drafter", "drafter.1", 1, 0, "0.1.0", 4711, CARD),
    "submit_text": Submit("r-1", from_text("def f("), Sampling(max_tokens=32, seed=7)),
    "verify": Verify(KEY, 8, 50.0),
    "verified": Verified(KEY, 8, 2, (5, 6, 7), ("a", "", "é"), "", "", 0, 12.5, 0.25),
    "features": Features("s-1", 1, 1000, Tensor("bfloat16", (2, 2), bytes(range(8)))),
    "block": Block(KEY, (1, 2), (0.5, 1.0)),
}


COUNT = st.integers(0, 2**53 - 1)
TOKEN = st.integers(0, 2**31 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SHARE = st.floats(0, 1)
REAL = st.floats(0, 1e12)
SCALAR = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), REAL, TEXT)

LOG = st.floats(-1e12, 0)
SIGNED = st.floats(-100, 100)

BY_NAME = {
    "Sampling.min_p": SHARE,
    "Sampling.repetition_penalty": st.floats(1e-3, 1e3),
    "Sampling.bias_ids": st.lists(TOKEN, max_size=5).map(tuple),
    "Sampling.bias_values": st.lists(SIGNED, max_size=5).map(tuple),
    "Sampling.stop_ids": st.lists(TOKEN, max_size=5).map(tuple),
    "Sampling.logprobs": st.integers(-1, 20),
    "Sampling.cascade_alpha": SHARE,
    "logprobs": st.lists(LOG, max_size=5).map(tuple),
    "top_logprobs": st.lists(LOG, max_size=5).map(tuple),
    "top_ids": st.lists(TOKEN, max_size=5).map(tuple),
    "anchor_id": TOKEN,
    "done": st.integers(0, 1000),
    "n_drafts": st.integers(1, 15),
    "rows": st.integers(1, 16),
    "top_p": SHARE,
    "temperature": st.floats(0, 1e6),
    "copy_ids": st.lists(TOKEN, max_size=15).map(tuple),
    "confidences": st.lists(SHARE, max_size=15).map(tuple),
    "q_ids": st.just(()),
    "q_probs": st.just(()),
    "prompt": st.one_of(TEXT.map(from_text), st.lists(TOKEN, max_size=9).map(from_ids)),
    "prompt_ids": st.lists(TOKEN, max_size=9).map(from_ids),
    "Progress.done": SHARE,
    "Features.rows": st.builds(
        lambda n, h: Tensor("float32", (n, h), bytes(4 * n * h)),
        st.integers(0, 3),
        st.integers(0, 3),
    ),
}
BY_TYPE = {
    bool: st.booleans(),
    int: COUNT,
    float: REAL,
    str: TEXT,
    tuple[int, ...]: st.lists(COUNT, max_size=5).map(tuple),
    tuple[float, ...]: st.lists(REAL, max_size=5).map(tuple),
    tuple[str, ...]: st.lists(TEXT, max_size=5).map(tuple),
}


def _field(owner, name, hint):
    for key in (f"{owner}.{name}", name):
        if key in BY_NAME:
            return BY_NAME[key]
    if hint in (RoundKey, Sampling, ModelCard):
        return of_class(hint)
    if typing.get_origin(hint) is Mapping:
        return st.dictionaries(TEXT, SCALAR, max_size=4)
    if hint == ModelCard | None:
        return st.one_of(st.none(), of_class(ModelCard))
    return BY_TYPE[hint]


@st.composite
def _paired(draw, kind, max_items):
    """Classes whose tuples must have equal lengths."""
    n_items = draw(st.integers(1, max_items))
    fields = {}
    for field in dataclasses.fields(kind):
        hint = typing.get_type_hints(kind)[field.name]
        fields[field.name] = draw(_field(kind.__name__, field.name, hint))
    n_of = {
        "ids": st.lists(TOKEN, min_size=n_items, max_size=n_items),
        "pieces": st.lists(TEXT, min_size=n_items, max_size=n_items),
        "confidences": st.lists(SHARE, min_size=n_items, max_size=n_items),
        "q_ids": st.lists(TOKEN, min_size=2 * n_items, max_size=2 * n_items),
        "q_probs": st.lists(SHARE, min_size=2 * n_items, max_size=2 * n_items),
    }
    fields |= {name: tuple(draw(of)) for name, of in n_of.items() if name in fields}
    if "n_accepted" in fields:
        fields["n_accepted"] = n_items - 1
    if "certainty" in fields:
        fields["certainty"] = draw(SHARE)
    if "rows_run" in fields:
        fields["rows_run"] = n_items
    return kind(**fields)


def of_class(kind):
    """Any valid value of a message or part class."""
    if kind in (Block, Tokens):
        return _paired(kind, 15)
    if kind is Verified:
        return _paired(kind, 16)
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    return st.builds(kind, **{name: _field(kind.__name__, name, hints[name]) for name in names})


ANY = st.one_of([of_class(kind) for kind in TYPE_NUMBERS])
