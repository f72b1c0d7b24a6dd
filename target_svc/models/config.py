"""Fields of a published config.json that every plain decoder has.

Owns their spellings over the years, and the sentences that refuse a value by name. Does not know
any network. Invariant: a field is honoured or refused, never ignored, where it changes numbers.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from common.errors import ModelMismatch

#: A field with one implemented value: its name, that value, and the value of a config without it.
Only = tuple[str, object, object]

SILU: Final[Only] = ("hidden_act", "silu", "silu")


@contextmanager
def reading(family: str) -> Iterator[None]:
    """Name the field that a config lacks.

    Raises:
        ModelMismatch: instead of the KeyError of a missing field.
    """
    try:
        yield
    except KeyError as error:
        raise ModelMismatch(
            f"config.json lacks {error.args[0]!r}; a {family} target needs it"
        ) from error


def refuse_others(text: Mapping[str, Any], only: Iterable[Only]) -> None:
    """Refuse by name what is not implemented.

    Raises:
        ModelMismatch: a field has another value than the one that is implemented.
    """
    for field, wanted, absent in only:
        value = text.get(field, absent)
        if value != wanted:
            raise ModelMismatch(f"{field} {value!r}; only {wanted!r} is implemented")


def end_ids(text: Mapping[str, Any], outer: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that end a text; of the text part, else of the whole."""
    found = text.get("eos_token_id")
    found = outer["eos_token_id"] if found is None else found
    return tuple(found) if isinstance(found, list) else (found,)


def is_tied(text: Mapping[str, Any], outer: Mapping[str, Any]) -> bool:
    """Whether the head is the embedding; of the text part, else of the whole."""
    return bool(text.get("tie_word_embeddings", outer.get("tie_word_embeddings", False)))


def rope_parameters(text: Mapping[str, Any], **absent: object) -> dict[str, Any]:
    """Rope fields under their present names, whichever of three ways the config spells them.

    Args:
        text: has `rope_parameters`, or `rope_scaling` and `rope_theta`, or `rope_theta` alone.
        absent: values of fields that the config leaves out.

    Returns:
        At least "rope_type"; "rope_theta" where the config or `absent` has it.
    """
    own = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    own.setdefault("rope_type", own.pop("type", None) or "default")
    for field in ("rope_theta", "partial_rotary_factor"):
        if field in text:
            own.setdefault(field, text[field])
    return {**absent, **own}
