"""The byte-level BPE vocabulary and the token files made with it.

Owns `tokenizer.json` and the flat uint16 arrays. Does not know where texts come from.
Ids 0 and 1 are `<eos>` and `<mask>`; every document ends with `<eos>`.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EOS, MASK = "<eos>", "<mask>"


def train_tokenizer(
    texts: Sequence[str], vocab_size: int, megabytes: float, seed: int
) -> Tokenizer:
    """Learn a vocabulary from a random part of the texts."""
    order = list(range(len(texts)))
    random.Random(seed).shuffle(order)
    picked, size = [], 0
    for index in order:
        if size > megabytes * 1e6:
            break
        picked.append(texts[index])
        size += len(texts[index])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(picked, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str], eos: int = 0) -> np.ndarray:
    """Token ids uint16 [n] of all texts, an eos after each."""
    parts = []
    for start in range(0, len(texts), 2048):
        for encoded in tokenizer.encode_batch(list(texts[start : start + 2048])):
            parts.append(np.array([*encoded.ids, eos], dtype=np.uint16))
    return np.concatenate(parts) if parts else np.zeros(0, np.uint16)


def load_tokenizer(path: Path) -> Tokenizer:
    """Read `tokenizer.json`."""
    return Tokenizer.from_file(str(path))
