"""Text to token ids and back.

Owns the tokenizer and incremental text. Does not know models, stop rules or messages. Text never
becomes a special token: those are for whoever sends ids.
"""

import re
from copy import copy
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from common.errors import ConfigError

_INCOMPLETE: Final = "\ufffd"
_MOST_MARKS: Final = 3  # bytes of a character that is not complete
_BYTE_NAME: Final = re.compile("<0x([0-9A-F]{2})>")  # a token that byte fallback reads as a byte
_MOST_WAITING: Final = 64  # ids; a run of bytes that is no text is decoded in parts so long


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

    What may still become another character is held back: at most the last bytes of one, which a
    decoder shows as one mark (byte-level) or as a mark per byte (byte fallback). A decoder of the
    second kind shows marks for a whole run of bytes while its last character is incomplete, also in
    place of characters that were handed out: then nothing more comes until it shows them again, or
    the run has ended. Its bytes are followed here too, since its marks may also be the text's own.

    Only a window of ids is decoded: the last ones whose text is certain, since a decoder may drop a
    space in front of its first token, and those that came after.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the window
        self._n_sure = 0  # of them, the first so many are there only to be decoded with the rest
        self._shown = ""  # the window's text, as far as it has been handed out
        self._open = b""  # byte fallback: the bytes of a character that is not complete
        self._is_wrong_run = False  # byte fallback: the run holds bytes that are no text

    def twin(self) -> "Detokenizer":
        """Another one at the same place; neither changes the other."""
        other = copy(self)
        other._ids = list(self._ids)
        return other

    def push(self, token: int) -> str:
        """Add one id; the text that is now certain, often one word, or ""."""
        was_open = bool(self._open)
        is_whole = self._follow(token)
        self._ids.append(token)
        if self._open:
            return ""
        text = self._decode(self._ids)
        marks = 0 if is_whole else len(text) - len(text.rstrip(_INCOMPLETE))
        is_cut = was_open and not is_whole
        if is_cut and not marks:
            piece = self._without_the_sure()
            self._move_on()
            return piece
        piece = self._new(text[: len(text) - min(marks, _MOST_MARKS)])
        if not marks:
            piece = piece if text.startswith(self._shown) else self._without_the_sure()
            self._move_on()
        elif len(self._ids) - self._n_sure >= _MOST_WAITING:  # bytes of no text: cut the run here
            piece += self._new(text)
            self._move_on()
        return piece

    def finish(self) -> str:
        """The text held back, with marks in place of a character that stayed incomplete."""
        text = self._decode(self._ids)
        is_as_shown = text.startswith(self._shown) and not self._open
        piece = self._new(text) if is_as_shown else self._without_the_sure()
        self._open = b""
        self._move_on()
        return piece

    def _follow(self, token: int) -> bool:
        """Whether this id completes a character of a run of bytes that is all text so far."""
        name = self._tokenizer.id_to_token(token) or ""
        spelled = _BYTE_NAME.fullmatch(name)
        if spelled is None or self._decode([token]) == name:
            self._open, self._is_wrong_run = b"", False
            return False
        if self._is_wrong_run:
            return False
        run = self._open + bytes.fromhex(spelled[1])
        self._open = b""
        try:
            run.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                self._open = run
            else:
                self._is_wrong_run = True
            return False
        return True

    def _new(self, text: str) -> str:
        """What of the window's text was not handed out; nothing where a decoder went back on it."""
        if len(text) <= len(self._shown) or not text.startswith(self._shown):
            return ""
        piece = text[len(self._shown) :]
        self._shown = text
        return piece

    def _without_the_sure(self) -> str:
        """What was not handed out, by a decoder that now shows what came before in another way."""
        n_shown = len(self._shown) - len(self._decode(self._ids[: self._n_sure]))
        return self._decode(self._ids[self._n_sure :])[max(0, n_shown) :]

    def _move_on(self) -> None:
        """All of the window is certain: keep the ids that came last, for what follows them."""
        self._ids = self._ids[self._n_sure :]
        self._n_sure = len(self._ids)
        self._shown = self._decode(self._ids)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text
