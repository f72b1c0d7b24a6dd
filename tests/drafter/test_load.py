"""Loading: what is refused, by which name, and what the card says."""

import json
from dataclasses import replace

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
from common.wire.version import card_mismatch
from drafter_svc.config import default_tap_layer_ids, parse_config
from drafter_svc.load import TARGET_SIDE, load
from drafter_svc.model import tensor_shapes
from drafter_svc.rope import RopeConfig

TARGET = {"hidden_size": H, "num_hidden_layers": 8, "vocab_size": 256}
SLIDING, FULL = "sliding_attention", "full_attention"
ROPE_FIELDS = "rope_type|partial_rotary|factor|rope_theta"


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
        ("mask_token_id", -1),
        ("draft_vocab_size", 128),
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
        ("causal", True),
        ("causal", "no"),
        ("hidden_act", "gelu"),
        ("draft_window_size", 64),
        ("attention_bias", True),
        ("sample_from_anchor", True),
        ("rope_parameters", {"rope_type": "llama3"}),
        ("rope_parameters", {"partial_rotary_factor": 0.5}),
        ("rope_parameters", {"sliding_attention": {"rope_theta": 1e6}}),
        ("rope_parameters", {"rope_type": "yarn", "original_max_position_embeddings": 64}),
        ("rope_parameters", {"rope_type": "linear"}),
        ("rope_parameters", {"rope_type": "linear", "factor": 0}),
        ("rope_parameters", {"rope_theta": 5e5}),
        ("rope_parameters", {"attention_factor": "1"}),
        ("rope_theta", 0),
        ("rope_is_neox_style", False),
        ("final_logit_softcapping", -1.0),
        ("hidden_size", None),
        ("architectures", ["Qwen3ForCausalLM"]),
        ("architectures", ["DFlashDraftModel"]),
    ],
)
def test_a_config_that_does_not_fit_together_is_refused_by_name(name, value):
    """Stops: a field that is ignored, or a drafter that silently drafts badly."""
    parse_config(tiny_config(TARGET))
    known = {"architectures": "conv_kernel_size", "rope_parameters": ROPE_FIELDS}
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
        (False, [FULL, FULL], None, (False, False)),
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
    ("changes", "words"),
    [
        ({"vocab": 512}, "vocab_size is 256, the target has 512"),
        ({"vocab": 250}, "vocab_size is 256, the target has 250"),
        ({"hidden": 128}, "hidden_size is 64, the target has 128"),
        ({"n_layers": 7}, "num_target_layers is 8, the target has 7"),
    ],
)
def test_a_drafter_of_another_target_is_refused(tmp_path, target, changes, words):
    """Stops: pairing by folder names, and a refusal that leaves the user to find the two sizes."""
    folder = make_tiny_drafter(tmp_path / "d", target)
    other = make_stand_in_target(tmp_path / "t", **changes)
    with pytest.raises(ModelMismatch, match=f"drafter's {words}"):
        load(folder, other)


def test_running_sides_of_different_vocabularies_are_not_paired(tmp_path, target):
    """Stops: ids of one vocabulary looked up in the other, once both processes run."""
    card = load(make_tiny_drafter(tmp_path / "d", target), target).card
    other = replace(card, vocab_size=300)
    refusal = card_mismatch("target.1", other, "drafter.1", card)
    assert refusal.startswith("vocab_size differs: target.1 has 300, drafter.1 has 256")


def test_a_mask_token_outside_the_vocabulary_is_refused_before_it_is_looked_up(tmp_path, target):
    """Stops: an id that gathers from outside the table, which no device reports."""
    for mask_id in (256, -1):
        folder = make_tiny_drafter(tmp_path / str(mask_id), target, mask_token_id=mask_id)
        with pytest.raises(ModelMismatch, match=rf"mask_token_id is {mask_id}; .* in 0\.\.255"):
            load(folder, target)
    load(make_tiny_drafter(tmp_path / "last", target, mask_token_id=255), target)


def test_rotary_settings_are_the_drafters_own(tmp_path, target):
    """Stops: theta, partial rotation or sections taken over from the target."""
    other = make_stand_in_target(tmp_path / "t")
    raw = json.loads((other / "config.json").read_text())
    theirs = {"rope_theta": 5e6, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
    raw["text_config"] |= {"rope_theta": 5e6, "rope_parameters": theirs}
    (other / "config.json").write_text(json.dumps(raw | {"rope_theta": 3.0}))
    folder = make_tiny_drafter(tmp_path / "d", target, rope_theta=777.0)
    assert load(folder, other).config == load(folder, target).config
    assert load(folder, other).config.rope == RopeConfig(777.0, original_max_position=4096)


@pytest.mark.parametrize("at", ["rope_parameters", "rope_scaling"])
def test_theta_may_stand_among_the_rotary_settings(at):
    """Stops: the default theta for files of newer or older loaders."""
    config = tiny_config(TARGET)
    del config["rope_theta"]
    said = {"rope_type": "default", "rope_theta": 5e5}
    assert parse_config({**config, at: said}).rope.theta == 5e5
    assert parse_config({**config, at: said, "rope_theta": 5e5}).rope.theta == 5e5
    both = {"rope_parameters": said, "rope_scaling": {**said, "rope_theta": 2e5}}
    with pytest.raises(ModelMismatch, match="rope_scaling"):
        parse_config({**config, **both})


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
