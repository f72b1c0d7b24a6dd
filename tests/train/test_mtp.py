"""The MTP head: what stands beside what, its cache, its chain."""

import pytest

torch = pytest.importorskip("torch", reason="torch (extra `train`) is not installed")

from support.trainer_cases import SMALL, random_head, random_target  # noqa: E402

from drafter_svc.train.mtp import chain_losses  # noqa: E402
from drafter_svc.train.mtp_net import Chain  # noqa: E402

IDS = torch.randint(2, 128, (1, 70), generator=torch.Generator().manual_seed(1))


def read(head, target, room: int = 90):
    """The head's rows over IDS, first in one pass, then row by row after a prompt of 40."""
    with torch.no_grad():
        streams = target(IDS).streams
        embedded = target.embed_tokens(IDS[:, 1:])
        whole, _ = head(embedded, streams[:, :-1])
        cache = {"room": room, "position": torch.zeros((), dtype=torch.int64)}
        rows = [head(embedded[:, :40], streams[:, :40], cache)[0]]
        rows += [
            head(embedded[:, i : i + 1], streams[:, i : i + 1], cache)[0] for i in range(40, 69)
        ]
    return whole, torch.cat(rows, 1)


def test_rows_one_by_one_equal_one_pass() -> None:
    """69 rows against a budget of 32: the head's own index keys are cached too."""
    whole, rows = read(random_head(), random_target())
    torch.testing.assert_close(rows, whole, atol=2e-5, rtol=1e-4)


def test_a_chain_is_what_a_text_with_its_drafts_would_give() -> None:
    """Link by link by hand, each with a fresh pass over everything before it."""
    head, target = random_head(), random_target()
    with torch.no_grad():
        streams = target(IDS).streams
        chain = Chain(head, target, IDS, streams)
        for anchor in (1, 12, 66):
            before, ids, expected = streams[:, :anchor], IDS[:, : anchor + 1], []
            for _ in range(4):
                out, _ = head(target.embed_tokens(ids[:, 1:]), before)
                best = target.logits(head.read(out))[:, -1:].argmax(-1)
                expected.append(int(best))
                before, ids = torch.cat([before, out[:, -1:]], 1), torch.cat([ids, best], 1)
            assert chain.draft(anchor, 4) == expected
            assert chain.draft(anchor, 4) == expected


def test_labels_are_the_targets_next_choices() -> None:
    """One position off trains a head that drafts what is already there."""
    head, target = random_head(), random_target()
    losses, _ = chain_losses(head, target, IDS, 2)
    with torch.no_grad():
        trunk = target(IDS)
        best = target.logits(trunk.hidden).argmax(-1)
        out, _ = head(target.embed_tokens(IDS[:, 1:]), trunk.streams[:, :-1])
        logits = target.logits(head.read(out))[0]
        first = torch.nn.functional.cross_entropy(logits, best[0, 1:])
        again, _ = head(target.embed_tokens(IDS[:, 2:]), out[:, :-1])
        logits = target.logits(head.read(again))[0]
        second = torch.nn.functional.cross_entropy(logits, best[0, 2:])
    torch.testing.assert_close(losses[0], first)
    torch.testing.assert_close(losses[1], second)


def test_the_head_has_the_published_31_tensors() -> None:
    """A name of our own is dropped by every other loader."""
    names = set(random_head().state_dict())
    assert len(names) == 31
    assert {"fc_embedding.weight", "layers.0.self_attn.indexer.index_qk_proj.weight"} <= names
    assert SMALL.layer_types.index("full_attention") == 3
