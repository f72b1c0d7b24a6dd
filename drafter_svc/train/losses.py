"""What the written target loses on text it was not trained on, and what each part is worth.

Owns the held-out losses and the ablations. Does not know training.
"""

import math
from pathlib import Path

import numpy as np
import torch

from drafter_svc.train.export import read_target
from drafter_svc.train.files import WorkFolder, pick_device
from drafter_svc.train.pretrain import next_token_loss
from drafter_svc.train.recipe import Recipe
from drafter_svc.train.target_net import TargetNet
from drafter_svc.train.tokenizer import load_tokenizer


@torch.no_grad()
def nats_per_token(
    net: TargetNet, ids: np.ndarray, sequence: int, limit: int, part: int = 4
) -> float:
    """Mean loss over consecutive windows of a flat array; a window starts with no context."""
    device = net.embed_tokens.weight.device
    count = min(limit, (len(ids) - 1) // sequence)
    if count == 0:
        return math.nan
    rows = torch.from_numpy(ids[: count * sequence + 1].astype(np.int64)).to(device)
    losses = []
    for start in range(0, count, part):
        stop = min(count, start + part)
        x = rows[start * sequence : stop * sequence].view(-1, sequence)
        y = rows[start * sequence + 1 : stop * sequence + 1].view(-1, sequence)
        loss = next_token_loss(net(x).hidden, net.embed_tokens.weight, y)
        losses.append(loss.item() * len(x))
    return sum(losses) / count


def file_loss(target: TargetNet, folder: Path, tokenizer_path: Path, length: int) -> float:
    """Nats per byte over whole files of a folder in windows of the context."""
    tokenizer = load_tokenizer(tokenizer_path)
    nats = size = 0.0
    for path in sorted(folder.glob("*.py.txt")):
        text = path.read_text(encoding="utf-8")
        ids = np.array([0, *tokenizer.encode(text).ids], np.int64)
        window = min(length, len(ids) - 1)
        count = (len(ids) - 1) // window
        nats += nats_per_token(target, ids, window, count) * count * window
        size += len(text.encode()) * count * window / (len(ids) - 1)
    return nats / size if size else 0.0


def validate(recipe: Recipe, work: WorkFolder) -> dict[str, float]:
    """Loss on the validation packages: as served, with dense attention, without the table."""
    net = read_target(recipe.target, work.target).to(pick_device()).eval()
    ids = np.load(work.tokens("validation"))
    sizes = np.load(work.root / "validation_bytes.npy")
    bytes_per_token = float(sizes[0] / len(ids))
    length = min(recipe.pretrain.sequence, len(ids) - 1)
    limit = recipe.evaluate.windows

    def loss() -> float:
        return nats_per_token(net, ids, length, limit) / bytes_per_token

    values = {"bytes_per_token": bytes_per_token, "window": float(length), "nats_per_byte": loss()}
    net.select(sparse=False)
    values["nats_per_byte_dense_attention"] = loss()
    net.select(sparse=True)
    for layer in recipe.target.ple_layer_ids:
        net.layers[layer - 1].ple.ple_embedding.ngram_embedding.weight.data.zero_()
    values["nats_per_byte_without_table"] = loss()
    work.note("validate", {k: round(v, 4) for k, v in values.items()})
    return values
