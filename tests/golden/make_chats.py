"""Render conversations by transformers' own `apply_chat_template`: `chats.json`.

Run from the repository's root in the reference environment:
`PYTHONPATH=.:tests python tests/golden/make_chats.py`. The templates are written here, in the
manner of published ones, so that no model's file is copied.
"""

import json
from pathlib import Path

from support.chat_cases import CONVERSATIONS, TEMPLATES
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

OUT = Path(__file__).with_name("chats.json")


def rendered(source, conversation):
    """The text, or the sentence with which the template refuses."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE({"a": 0}, [])), bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = source
    arguments = conversation.get("template_kwargs", {})
    try:
        return tokenizer.apply_chat_template(
            conversation["messages"],
            tools=conversation.get("tools"),
            tokenize=False,
            add_generation_prompt=True,
            **arguments,
        )
    except Exception as error:  # noqa: BLE001  # jinja2's, whatever it is here
        return {"refused": str(error)}


texts = {
    f"{template}/{name}": rendered(source, conversation)
    for template, source in TEMPLATES.items()
    for name, conversation in CONVERSATIONS.items()
}
OUT.write_text(json.dumps(texts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
