"""Text to token ids and back.

Owns the tokenizer and incremental text. Does not know models, stop rules or messages. Text never
becomes a special token: those are for whoever sends ids.
"""

from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from common.errors import ConfigError

_LONGEST_CHAR: Final = 4  # bytes of a UTF-8 character, each of which may be a token
_INCOMPLETE: Final = "\ufffd"


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read `tokenizer.json` of a checkpoint folder.

    Raises:
        ConfigError: the file is missing or damaged.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"tokenizer not found: {str(path)!r}; a checkpoint folder must hold it")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(
            f"tokenizer unreadable: {str(path)!r} ({error}); copy it again"
        ) from error
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a prompt stays text
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of `text`, with nothing added."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


class Detokenizer:
    """Turns ids into text piece by piece; the pieces joined are the text of all ids.

    A piece never ends in half a character: it waits for the tokens that complete it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0  # ids whose text has been handed out
        self._context = 0  # ids before these are no longer needed to decode the next

    def push(self, token: int) -> str:
        """Add one id; the text that is now complete, often one word, or ""."""
        self._ids.append(token)
        text = self._new_text()
        waiting = len(self._ids) - self._shown
        if text.endswith(_INCOMPLETE) and waiting < _LONGEST_CHAR:
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return text

    def finish(self) -> str:
        """The text held back, with a mark in place of a character that stayed incomplete."""
        text = self._new_text()
        self._context = self._shown = len(self._ids)
        return text

    def _new_text(self) -> str:
        before = self._decode(self._ids[self._context : self._shown])
        after = self._decode(self._ids[self._context :])
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text
