"""What the drafter's goldens were made with; shared by their generator and their test."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from support.tiny_drafter import H, V, tiny_config

SLIDING, FULL = "sliding_attention", "full_attention"
TARGET_CONFIG = {"hidden_size": H, "num_hidden_layers": 8, "vocab_size": V}
LENGTHS = (3, 15, 16, 40)  # context rows; the window is 16, so 15 fill it


@dataclass(frozen=True)
class Case:
    """One drafter."""

    seed: int
    is_second: bool = True
    first_pos: int = 0  # position of the context's first row
    changes: dict[str, Any] = field(default_factory=dict)
    target_config: dict[str, Any] = field(default_factory=lambda: TARGET_CONFIG)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CASES = {
    "second": Case(1),
    "second_late_three_taps": Case(2, first_pos=1000, changes={"conv_kernel_size": 3}),
    "second_mixed_layers": Case(
        3,
        changes={
            "layer_types": [SLIDING, FULL, SLIDING],
            "num_hidden_layers": 3,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 3.0,
            "input_embedding_scale": 1.5,
        },
    ),
    "second_yarn": Case(4, first_pos=50, changes={"rope_parameters": YARN}),
    "first": Case(5, is_second=False),
    "first_mixed_layers": Case(6, is_second=False, changes={"layer_types": [SLIDING, FULL]}),
    "first_not_causal": Case(7, is_second=False, changes={"is_causal": False}),
    "first_full": Case(
        8,
        is_second=False,
        changes={
            "layer_types": [FULL, FULL],
            "rope_parameters": {"rope_type": "linear", "factor": 2.0},
        },
    ),
}


def target_tensors(seed=100, vocab=V, hidden=H):
    """Embedding and head of `make_stand_in_target`, float32 [V, H] each."""
    rng = np.random.default_rng(seed)
    embedding, head = (rng.standard_normal((vocab, hidden)).astype(np.float32) for _ in range(2))
    return (embedding * 0.5).astype(np.float32), (head * 1.5 / hidden**0.5).astype(np.float32)


def taps_of(config, length):
    """Taps of a context, float32 [length, T * H]; each layer's of another size."""
    n_taps = len(config["dflash_config"]["target_layer_ids"])
    rng = np.random.default_rng(length)
    taps = rng.standard_normal((length, n_taps, config["hidden_size"])) * [[[1.0], [2.0], [0.5]]]
    return taps.reshape(length, -1).astype(np.float32)


def anchor_of(length):
    """The anchor of a context."""
    return (length * 37 + 5) % V


#: Drafters that runtimes follow through whole sessions, each with its own cache.
RUNS = {
    "second_full": Case(21, changes={"layer_types": [FULL, FULL]}),
    "second_sliding": Case(22),
    "second_mixed": Case(23, changes=CASES["second_mixed_layers"].changes),
    "first_full": Case(24, is_second=False, changes={"layer_types": [FULL, FULL]}),
    "first_sliding": Case(25, is_second=False),
    "first_causal": Case(
        26, is_second=False, changes={"layer_types": [SLIDING, FULL], "is_causal": True}
    ),
}
#: What mlx-vlm packed; ranks and widths are whole groups of 32.
PACKED = Case(31, changes={"layer_types": [FULL, FULL], "selector_rank": 32})
RUNTIMES = ("zlab", "zlab_mlx", "mlx_vlm")
#: Rows per append: beside and beyond the window of 16, single rows over a wrapped store.
RUN_SIZES = (5, 3, 4, 8, 1, 1, 1, 3, 40, 1, 1, 8)
#: What is kept of a block's logits [7, V].
KEPT_SLOTS, KEPT_IDS = (0, 3, 6), slice(None, None, 8)


def config_of(case):
    """A case's config.json."""
    return tiny_config(case.target_config, is_second=case.is_second, **case.changes)
