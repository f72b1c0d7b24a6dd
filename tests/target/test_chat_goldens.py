"""Chats are rendered as transformers renders them; see tests/golden/make_chats.py."""

import json
from pathlib import Path

import pytest
from support.chat_cases import CONVERSATIONS, TEMPLATES

from common.errors import BadRequest, Unsupported
from target_svc.chat import ChatTemplates

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "chats.json").read_text("utf-8"))
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_is_rendered_as_the_reference_does(template, name):
    """A space more or less is another prompt than the model was trained on."""
    templates = ChatTemplates({"default": TEMPLATES[template]}, SPECIAL)
    chat, golden = CONVERSATIONS[name], GOLDEN[f"{template}/{name}"]
    asked = chat["messages"], chat.get("tools"), chat.get("template_kwargs")
    if template != "marks" and name in ("tools", "arguments"):  # it reads neither: said, not lost
        with pytest.raises((BadRequest, Unsupported), match="reads no"):
            templates.render(*asked)
    elif isinstance(golden, dict):
        with pytest.raises(BadRequest, match=golden["refused"]):
            templates.render(*asked)
    else:
        assert templates.render(*asked) == golden


def test_the_goldens_hold_what_they_are_for():
    """Texts, refusals, tools and marks."""
    assert any(isinstance(text, dict) for text in GOLDEN.values())
    assert "a < b & 'c'" in GOLDEN["marks/tools"]
    assert GOLDEN["marks/turns"].count("</think>") == 0
