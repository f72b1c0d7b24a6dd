"""Loading: what is refused, by which name, and what the card says."""

import json

import numpy as np
import pytest
from support.tiny_drafter import (
    H,
    make_stand_in_target,
    make_tiny_drafter,
    tiny_config,
    tiny_tensors,
    write_tensors,
)

from common.errors import ConfigError, ModelMismatch
from drafter_svc.config import default_tap_layer_ids, parse_config
from drafter_svc.load import TARGET_SIDE, load
from drafter_svc.model import tensor_shapes

TARGET = {"hidden_size": H, "num_hidden_layers": 8, "vocab_size": 256}
SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_stand_in_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 1),
        ("block_size", "8"),
        ("mask_token_id", None),
        ("mask_token_id", 256),
        ("target_layer_ids", [3, 1]),
        ("target_layer_ids", [1, 8]),
        ("target_layer_ids", []),
        ("conv_group_size", 7),
        ("conv_group_size", 0),
        ("conv_kernel_size", None),
        ("selector_rank", None),
        ("selector_top_k", 0),
        ("selector_top_k", 300),
        ("is_causal", True),
        ("is_causal", 1),
        ("layer_types", [SLIDING]),
        ("layer_types", [SLIDING, "linear_attention"]),
        ("sliding_window", None),
        ("sliding_window", 1),
        ("num_key_value_heads", 3),
        ("head_dim", 15),
        ("tap_contraction", "sum"),
        ("attention_bias", True),
        ("sample_from_anchor", True),
        ("rope_parameters", {"rope_type": "llama3"}),
        ("rope_parameters", {"partial_rotary_factor": 0.5}),
        ("final_logit_softcapping", -1.0),
        ("hidden_size", None),
        ("architectures", ["Qwen3ForCausalLM"]),
        ("architectures", ["DFlashDraftModel"]),
    ],
)
def test_a_config_that_does_not_fit_together_is_refused_by_name(name, value):
    """Stops: a field that is ignored, or a drafter that silently drafts badly."""
    parse_config(tiny_config(TARGET))
    known = {"architectures": "conv_kernel_size", "rope_parameters": "rope_type|partial_rotary"}
    with pytest.raises(ModelMismatch, match=f"{name}|{known.get(name, name)}"):
        parse_config(tiny_config(TARGET, **{name: value}))


@pytest.mark.parametrize("field", ["conv_kernel_size", "selector_rank"])
def test_dflash_fields_may_stand_at_the_root(field):
    """Stops: older files, which have no `dflash_config`, being read with defaults."""
    nested = tiny_config(TARGET)
    flat = {**nested, **nested["dflash_config"]}
    del flat["dflash_config"]
    assert parse_config(flat) == parse_config(nested)
    with pytest.raises(ModelMismatch, match=field):
        parse_config({**nested, field: 99})


@pytest.mark.parametrize(
    ("is_second", "types", "is_causal", "expected"),
    [
        (False, [SLIDING, FULL], None, (True, False)),
        (False, [SLIDING, FULL], False, (False, False)),
        (False, [SLIDING, FULL], True, (True, True)),
        (True, [SLIDING, FULL], None, (False, False)),
        (True, [SLIDING, SLIDING], False, (False, False)),
    ],
)
def test_causality_inside_a_block(is_second, types, is_causal, expected):
    """Stops: a causal DFlash2, which costs acceptance and reports nothing."""
    config = tiny_config(TARGET, is_second=is_second, layer_types=types, is_causal=is_causal)
    assert parse_config(config).causal == expected


def test_layers_without_types_follow_the_window_fields():
    """Stops: full attention where `max_window_layers` says sliding, and the reverse."""
    config = tiny_config(TARGET)
    del config["layer_types"]
    assert parse_config(config).sliding == (True, True)
    assert parse_config({**config, "max_window_layers": 1}).sliding == (False, True)
    assert parse_config({**config, "use_sliding_window": False}).sliding == (False, False)


@pytest.mark.parametrize(
    ("n_target", "n_layers", "expected"),
    [(36, 5, (1, 9, 17, 25, 33)), (64, 5, (1, 16, 31, 46, 61)), (8, 1, (4,)), (8, 3, (1, 3, 5))],
)
def test_default_taps_are_the_published_ones(n_target, n_layers, expected):
    """Stops: taps one layer off for files that do not list them."""
    assert default_tap_layer_ids(n_target, n_layers) == expected


@pytest.mark.parametrize("is_second", [True, False])
def test_every_tensor_is_needed_and_no_other_is_taken(tmp_path, target, is_second):
    """Stops: loading around a missing convolution or selector, which then drafts like DFlash."""
    config = tiny_config(TARGET, is_second=is_second)
    tensors = tiny_tensors(config)
    assert set(tensor_shapes(parse_config(config))) == set(tensors)
    for name in tensors:

        def drop(all_tensors, name=name):
            del all_tensors[name]

        folder = make_tiny_drafter(tmp_path / name, target, edit=drop, is_second=is_second)
        with pytest.raises(ModelMismatch, match=f"1 missing: {name}"):
            load(folder, target)
    extra = make_tiny_drafter(
        tmp_path / "extra", target, edit=lambda t: t.update(x=t["fc.weight"]), is_second=is_second
    )
    with pytest.raises(ModelMismatch, match="1 unexpected: x"):
        load(extra, target)


def test_a_tensor_of_a_wrong_shape_is_refused(tmp_path, target):
    """Stops: a broadcast that hides it."""

    def cut(tensors):
        tensors["norm.weight"] = tensors["norm.weight"][:1]

    with pytest.raises(ModelMismatch, match=r"norm.weight is \[1\], needs \[64\]"):
        load(make_tiny_drafter(tmp_path / "d", target, edit=cut), target)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"vocab": 512}, "vocab_size"),
        ({"hidden": 128}, "hidden_size"),
        ({"n_layers": 6}, "num_target_layers"),
    ],
)
def test_a_drafter_of_another_target_is_refused(tmp_path, target, changes, name):
    """Stops: pairing by folder names."""
    folder = make_tiny_drafter(tmp_path / "d", target)
    other = make_stand_in_target(tmp_path / "t", **changes)
    with pytest.raises(ModelMismatch, match=f"drafter's {name} is"):
        load(folder, other)


def test_a_target_without_an_embedding_is_refused(tmp_path, target):
    """Stops: a key error from the middle of loading."""
    folder = make_tiny_drafter(tmp_path / "d", target)
    other = make_stand_in_target(tmp_path / "t")
    write_tensors(other / "model.safetensors", {"wte": np.zeros((256, H), np.float32)})
    with pytest.raises(ModelMismatch, match="embedding not found"):
        load(folder, other)


def test_a_missing_folder_is_a_configuration_error(tmp_path, target):
    """Stops: a traceback for a mistyped path."""
    with pytest.raises(ConfigError, match="not found"):
        load(tmp_path / "nowhere", target)


def test_a_tied_head_is_the_embedding(tmp_path):
    """Stops: looking for a head that tied checkpoints do not have."""
    tied = make_stand_in_target(tmp_path / "t", is_tied=True)
    card = load(make_tiny_drafter(tmp_path / "d", tied), tied).card
    assert card.head_hash == card.embedding_hash


def test_the_card_names_what_both_sides_must_agree_on(tmp_path, target):
    """Stops: a pairing that nothing can refuse."""
    card = load(make_tiny_drafter(tmp_path / "a", target), target).card
    assert (card.block_size, card.window, card.hidden_size, card.vocab_size) == (8, 16, H, 256)
    assert card.tap_layer_ids == (1, 4, 6)
    assert card.tap_contraction == ""
    for name, field in zip(TARGET_SIDE, ("fc_hash", "norm_hash"), strict=True):

        def touch(tensors, name=name):
            tensors[name][0] += 1

        other = load(make_tiny_drafter(tmp_path / name, target, edit=touch), target).card
        assert getattr(other, field) != getattr(card, field)
        assert other.embedding_hash == card.embedding_hash != card.head_hash


@pytest.mark.parametrize("named", [None, "final_mixer"])
def test_streams_are_contracted_by_their_mean_unless_the_config_says_otherwise(tmp_path, named):
    """Stops: the two sides choosing different defaults."""
    target = make_stand_in_target(tmp_path / "t", hc=4)
    changes = {"tap_contraction": named} if named else {}
    card = load(make_tiny_drafter(tmp_path / "d", target, **changes), target).card
    assert card.tap_contraction == (named or "stream_mean")


def test_a_full_layer_means_an_unlimited_window(tmp_path, target):
    """Stops: a target that keeps too few rows for a replay."""
    folder = make_tiny_drafter(tmp_path / "d", target, layer_types=[SLIDING, FULL])
    assert load(folder, target).card.window == 0


def test_target_names_of_a_plain_checkpoint_are_found(tmp_path):
    """Stops: knowing only the multi-modal wrapper's names."""
    target = make_stand_in_target(tmp_path / "t")
    text = json.loads((target / "config.json").read_text())["text_config"]
    (target / "config.json").write_text(json.dumps(text))
    table = np.zeros((256, H), np.float32)
    write_tensors(
        target / "model.safetensors",
        {"model.embed_tokens.weight": table, "lm_head.weight": table + 1},
    )
    load(make_tiny_drafter(tmp_path / "d", target), target)
