"""From what a client sent to prompt ids: raw text, chat messages, or ids.

Owns which of the tokenizer's special tokens may be written by whom. Does not know sessions or
models. Raw text never becomes a special token unless the client allows it: it is refused, naming
the token. The chat template may write them; messages, tools and template_kwargs may not, in one
text or split over the parts of a list, so no text can end its own turn.
"""

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

from common.errors import BadRequest
from common.wire.messages import Open
from common.wire.tensors import to_text
from target_svc.chat import ChatTemplates
from target_svc.frames import ids_of

CHAT_KEYS = ("messages", "tools", "template_kwargs")


class Prompts:
    """Reads prompts for one tokenizer. Used on one thread: it switches the tokenizer's mode.

    Args:
        tokenizer: of the target's folder, reading special tokens as text.
        templates: of the same folder.
        vocab_size: of the model.
        empty_id: what an empty prompt becomes: the separator that starts a document.
    """

    def __init__(
        self, tokenizer: Tokenizer, templates: ChatTemplates, vocab_size: int, empty_id: int
    ) -> None:
        self._tokenizer = tokenizer
        self._templates = templates
        self._vocab_size = vocab_size
        self._empty_id = empty_id
        added = tokenizer.get_added_tokens_decoder().values()
        self._special = sorted((token.content for token in added if token.special), key=len)

    def ids_of(self, order: Open) -> list[int]:
        """Prompt ids, at least one.

        Raises:
            BadRequest: an id outside the vocabulary, a special token in text that may not hold one,
                or messages that are no messages.
            Unsupported: messages without a chat template.
        """
        if order.prompt.dtype != "uint8":
            ids = ids_of(order.prompt)
            self._check_ids(ids)
        elif order.is_chat:
            ids = self._encode(self._rendered(to_text(order.prompt), order.allow_special), True)
        else:
            text = to_text(order.prompt)
            if not order.allow_special:
                self._check_text("prompt", text)
            ids = self._encode(text, order.allow_special)
        return ids or [self._empty_id]

    def _rendered(self, body: str, allow_special: bool) -> str:
        chat = _chat_of(body)
        if not allow_special:
            for name in CHAT_KEYS:
                self._check_texts(name, chat.get(name))
        return self._templates.render(
            chat["messages"], chat.get("tools"), chat.get("template_kwargs")
        )

    def _check_texts(self, name: str, value: Any) -> None:
        try:
            for where, text in _texts(name, value):
                self._check_text(where, text)
        except RecursionError as error:
            raise BadRequest(f"{name}: nested too deeply") from error

    def _encode(self, text: str, with_special: bool) -> list[int]:
        if not text.isascii():
            _check_unicode(text)
        self._tokenizer.encode_special_tokens = not with_special
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        finally:
            self._tokenizer.encode_special_tokens = True
        return ids

    def _check_text(self, where: str, text: str) -> None:
        for token in self._special:
            if token in text:
                raise BadRequest(
                    f"{where}: it holds the special token {token!r} at character "
                    f"{text.index(token)}; take it out, or set allow_special"
                )

    def _check_ids(self, ids: list[int]) -> None:
        for token in ids:
            if not 0 <= token < self._vocab_size:
                raise BadRequest(
                    f"prompt: id {token} is outside the vocabulary 0..{self._vocab_size - 1}"
                )


def _chat_of(body: str) -> dict[str, Any]:
    try:
        chat = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"messages: {error}; a chat is a JSON object") from error
    if not isinstance(chat, dict) or not isinstance(chat.get("messages"), list):
        raise BadRequest("messages: a chat is a JSON object with a list of messages")
    unknown = sorted(set(chat) - set(CHAT_KEYS))
    if unknown:
        raise BadRequest(f"messages: unknown key {unknown[0]!r}; known: {', '.join(CHAT_KEYS)}")
    for index, message in enumerate(chat["messages"]):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest(f"messages[{index}]: {message!r:.40}; an object with a role is needed")
    if not isinstance(chat.get("tools") or [], list):
        raise BadRequest(f"tools: {chat['tools']!r:.40}; a list is needed")
    if not isinstance(chat.get("template_kwargs") or {}, dict):
        raise BadRequest(f"template_kwargs: {chat['template_kwargs']!r:.40}; an object is needed")
    return chat


def _check_unicode(text: str) -> None:
    """Half a surrogate pair is no character; JSON can spell one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"messages: no valid Unicode at {text[error.start]!r}") from error


def _texts(where: str, value: Any) -> Iterator[tuple[str, str]]:
    """Every text within, keys included, with its place; of a list also its parts joined."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from _texts(f"{where}[{index}]", one)
        for joined in _joined(value):
            yield where, joined
    elif isinstance(value, dict):
        for key, one in value.items():
            yield f"{where}.{key:.40}", key
            yield from _texts(f"{where}.{key:.40}", one)


def _joined(parts: list[Any]) -> Iterator[str]:
    """What a template makes of a list that it writes out part by part, each trimmed or not."""
    spelled = [part if isinstance(part, dict) else {"": part} for part in parts]
    for key in {key: None for part in spelled for key in part}:
        texts = [part[key].strip() for part in spelled if isinstance(part.get(key), str)]
        if len(texts) > 1:
            yield "".join(texts)
