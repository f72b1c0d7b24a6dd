"""glm5_next against goldens of transformers, however rows are fed, and its roll-backs."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.devices import has_gpu, on_device
from support.target_cases import CLOSE, arrays_of, feed, feed_parts, fork
from support.tiny import write_sharded
from support.tiny_glm5_next import (
    EOS_ID,
    PREFIX,
    TEXT,
    make_tiny_glm5_next,
    random_weights,
    tiny_config,
)

from common.errors import ModelMismatch, RollBackRefused
from common.wire.messages import Sampling
from target_svc.load import EngineOptions, load_engine
from target_svc.models.blocks.kimi_delta import KimiDelta, KimiShape, KimiWeights
from target_svc.models.blocks.sinkhorn import SinkhornConnection, StreamShape
from target_svc.models.blocks.sinkhorn_kernel import weigh_kernel
from target_svc.models.family import every, run_rows
from target_svc.models.glm5_next import ModelArgs, load
from target_svc.models.states.channel_recurrent import ChannelRows
from target_svc.models.states.rows import RowWindow
from target_svc.rollback import commit

PARITY = 5e-5
STRIDE = 4  # the goldens hold every fourth id
PATTERNS = {
    "all at once": lambda ids: [ids],
    "in chunks": lambda ids: [ids[:24], ids[24:56], ids[56:121], ids[121:]],
    "in fives": lambda ids: [ids[:32], *[ids[i : i + 5] for i in range(32, len(ids), 5)]],
}
#: Around edges of 4 and of 16-token pools; pools are dropped from 64 tokens on.
BASES = (1, 3, 4, 15, 16, 17, 60, 63, 64, 65, 79, 80)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny checkpoint of five layers: three recurrent ones, two of attention."""
    return make_tiny_glm5_next(tmp_path_factory.mktemp("glm5_next"))


@pytest.fixture(scope="module")
def model(folder):
    """The network of `folder`."""
    return load(folder)


@pytest.fixture(scope="module")
def golden():
    """What transformers computed; see tests/golden/make_glm5_next.py."""
    with np.load(Path(__file__).parents[1] / "golden" / "glm5_next.npz") as stored:
        return dict(stored)


@pytest.fixture(scope="module")
def sequence(golden):
    """150 token ids with the end of a text at 20, 41, 42 and 90."""
    return golden["ids"][0]


@pytest.fixture(scope="module")
def prefixes(model, sequence):
    """A committed state at each base, grown one row at a time."""
    states, state = {}, model.new_state()
    for base in range(max(BASES) + 1):
        if base in BASES:
            states[base] = fork(state)
        feed(model, state, sequence[base : base + 1])
    return states


@pytest.fixture(scope="module")
def one_by_one(model, sequence):
    """Logits [150, V] of one-row steps."""
    return feed_parts(model, _ones(sequence))


def _ones(ids):
    return [ids[i : i + 1] for i in range(len(ids))]


# --------------------------------------------------------------------------- parity


@pytest.mark.parametrize("pattern", PATTERNS)
def test_logits_equal_the_reference_however_rows_are_fed(model, golden, pattern):
    """A term forgotten, a stale pool, or a state that depends on how rows were grouped."""
    for ids, wanted in zip(golden["ids"], golden["logits"], strict=True):
        _assert_parity(feed_parts(model, PATTERNS[pattern](ids)), wanted)


def test_logits_of_one_row_steps_equal_the_reference(model, golden, one_by_one):
    """A form for one row that differs from that for many."""
    _assert_parity(one_by_one, golden["logits"][0])
    for ids, wanted in zip(golden["ids"][1:], golden["logits"][1:], strict=True):
        _assert_parity(feed_parts(model, _ones(ids)), wanted)


def _assert_parity(logits, wanted):
    assert np.abs(wanted).max() > 1
    assert np.abs(logits[:, ::STRIDE] - wanted).max() < PARITY


def test_a_chunk_may_end_anywhere(model, golden):
    """A border inside a pool or a scan chunk that loses a row."""
    ids, wanted = golden["ids"][1], golden["logits"][1]
    before, active = range(1, 34), range(62, 82)  # the indexer drops pools from 64 tokens on
    for border, end in [*((i, 50) for i in before), *((i, 100) for i in active)]:
        logits = feed_parts(model, [ids[:border], ids[border:end]])[:, ::STRIDE]
        assert np.abs(logits - wanted[:end]).max() < PARITY, border


def test_rows_that_are_attended_in_parts_give_the_samearrays_of(model, golden, monkeypatch):
    """A long prompt, whose scores do not fit at once: a part with another part's mask."""
    ids, wanted = golden["ids"][1], golden["logits"][1]
    monkeypatch.setattr("target_svc.models.blocks.latent_attention._MOST_SCORES", 4 * 150 * 7)
    assert np.abs(feed_parts(model, [ids])[:, ::STRIDE] - wanted).max() < PARITY


def test_taps_are_plain_means_of_the_streams(model, golden, sequence):
    """The tap of layer L taken before its MLP wrote, or at layer L - 1."""
    state, seen = model.new_state(), {}

    def tap(layer, streams):
        seen[layer] = model.contract("stream_mean", layer, streams)

    run_rows(model, sequence.tolist(), state, tap=tap)
    assert model.facts.contractions == ("stream_mean",)
    for layer in (0, 2, 3):
        wanted = golden[f"mean{layer}"]
        assert np.abs(np.array(seen[layer]) - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_forms_for_a_gpu_compute_the_same_function(folder, golden, monkeypatch):
    """Fused norms, sums of the balance and the solve by powers, which a CPU run never reaches."""
    for module in ("norms", "kimi_delta", "sinkhorn"):
        monkeypatch.setattr(f"target_svc.models.blocks.{module}.is_cpu", lambda: False)
    model, ids, wanted = load(folder), golden["ids"][0], golden["logits"][0]
    for parts in ([ids], PATTERNS["in fives"](ids)):
        assert np.abs(feed_parts(model, parts)[:, ::STRIDE] - wanted).max() < PARITY


def test_pipelined_builds_give_the_same_bits(model, prefixes, sequence):
    """A buffer that is written in place before a layer that was built on it has run."""
    results = []
    for layers in (0, 1):
        state = fork(prefixes[79])
        rows = sequence[79:87].tolist()
        results.append(np.array(run_rows(model, rows, state, submit=every(layers))))
    assert (results[0] == results[1]).all()


# --------------------------------------------------------------------------- blocks


def _kimi(rng, dt_bias, heads=2, dim=8, hidden=16):
    """A layer whose decay is `dt_bias` alone, and its weights by name."""
    width = heads * dim
    shapes = {
        "q": (width, hidden),
        "k": (width, hidden),
        "v": (width, hidden),
        "q_conv": (width, 1, 4),
        "k_conv": (width, 1, 4),
        "v_conv": (width, 1, 4),
        "decay_down": (dim, hidden),
        "decay_up": (width, dim),
        "a_log": (heads,),
        "dt_bias": (width,),
        "strength": (heads, hidden),
        "gate_down": (dim, hidden),
        "gate_up": (width, dim),
        "norm": (dim,),
        "out": (hidden, width),
    }
    weights = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    weights |= {"a_log": np.zeros(heads), "dt_bias": np.full(width, dt_bias)}
    weights["decay_up"] = np.zeros((width, dim))
    arrays = {name: mx.array(value.astype(np.float32)) for name, value in weights.items()}
    return KimiDelta(KimiWeights(**arrays), KimiShape(heads, dim, 4, -5.0), 1e-5), weights


def _kimi_by_rows(x, w, heads=2, dim=8):
    """The published recurrence in float64, row by row."""
    sig = lambda z: 1 / (1 + np.exp(-z))  # noqa: E731
    mixed = []
    for part in "qkv":
        padded = np.concatenate([np.zeros((3, heads * dim)), x @ w[part].T])
        taps = w[f"{part}_conv"][:, 0]
        conv = np.stack([(padded[i : i + 4] * taps.T).sum(0) for i in range(len(x))])
        mixed.append((conv * sig(conv)).reshape(len(x), heads, dim))
    q, k, v = mixed
    q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) / np.sqrt(dim)
    k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
    left = np.exp(-5 * sig(w["dt_bias"])).reshape(heads, dim)
    strength, outs, states = sig(x @ w["strength"].T), [], np.zeros((heads, dim, dim))
    for i in range(len(x)):
        states = states * left[..., None]
        added = strength[i][:, None] * (v[i] - np.einsum("hkv,hk->hv", states, k[i]))
        states = states + k[i][..., None] * added[:, None]
        outs.append(np.einsum("hkv,hk->hv", states, q[i]))
    out = np.stack(outs)
    out = out / np.sqrt((out * out).mean(-1, keepdims=True) + 1e-5) * w["norm"]
    gate = sig(x @ w["gate_down"].T @ w["gate_up"].T)
    return (out.reshape(len(x), -1) * gate) @ w["out"].T, states


@pytest.mark.parametrize("dt_bias", [40.0, 0.0, -40.0])
def test_the_scan_holds_at_the_bounds_of_decay(dt_bias):
    """A decay of e^-5 in every row of a chunk overflows its inverse, or none at all drifts."""
    rng = np.random.default_rng(3)
    layer, weights = _kimi(rng, dt_bias)
    x = rng.standard_normal((100, 16))
    for rows in (1, 16, 40, 100):
        window, state = RowWindow(3, 48, mx.float32), ChannelRows(1, (2, 8, 8))
        got = np.array(layer(mx.array(x[:rows].astype(np.float32)), window, state, 0))
        state.check(rows, rows)
        state.roll_back(rows)
        wanted, wanted_state = _kimi_by_rows(x[:rows], weights)
        assert np.abs(got - wanted).max() < 1e-5 * max(1, np.abs(wanted).max())
        assert np.abs(np.array(state.states) - wanted_state).max() < 1e-5


def test_mixing_matrices_are_balanced():
    """Rows normalized where columns should be: the last round leaves columns at 1."""
    rng = np.random.default_rng(0)
    fn, base = rng.standard_normal((24, 32)), rng.standard_normal(24)
    arrays = [mx.array(value.astype(np.float32)) for value in (fn, base, np.ones(3))]
    connection = SinkhornConnection(*arrays, StreamShape(4, 20, 1e-6, 1e-5))
    streams = mx.array(rng.standard_normal((6, 4, 8)).astype(np.float32))
    mix = np.array(connection.read(streams)[1].mix)
    assert np.abs(mix.sum(axis=1) - 1).max() < 1e-5
    assert np.abs(mix.sum(axis=2) - 1).max() < 0.1
    assert mix.min() > 0


@pytest.mark.device
def test_the_kernel_for_stream_weights_computes_the_plain_form():
    """A Metal or CUDA source that compiles and normalizes something else."""
    if not has_gpu():
        pytest.skip("needs Metal or CUDA")
    logits = np.random.default_rng(0).standard_normal((33, 24)).astype(np.float32)
    arrays = mx.zeros((24, 32)), mx.zeros((24,)), mx.ones((3,))
    plain = SinkhornConnection(*arrays, StreamShape(4, 20, 1e-6, 1e-5))._weigh(mx.array(logits))
    mx.eval(plain)
    with on_device(mx.gpu):
        weigh = weigh_kernel(4, 20, 1e-6)
        assert weigh is not None
        for got, wanted in zip(weigh(mx.array(logits)), plain, strict=True):
            assert np.abs(np.array(got) - np.array(wanted)).max() < 2e-6


# --------------------------------------------------------------------------- roll-back


def _after_verify(model, state, ids, keep, following):
    """Verify `ids`, keep `keep`; returns the state's numbers and the following rows' logits."""
    state = fork(state)
    mx.eval(run_rows(model, [int(i) for i in ids], state), *state.arrays())
    commit(state, keep)
    return arrays_of(state), feed(model, state, following)


@pytest.mark.parametrize("rows", [5, 16])
@pytest.mark.parametrize("base", BASES)
def test_two_wrong_tails_leave_the_same_bits(model, prefixes, sequence, base, rows):
    """A rejected row that leaks into state or scores, through any piece, at any pool edge."""
    rng = np.random.default_rng(rows * 1000 + base)
    true, following = sequence[base : base + rows], [11, 12]
    for keep in range(1, rows + 1):
        tails = rng.integers(8, 310, (2, rows - keep))
        tails[0, : min(2, rows - keep)] = EOS_ID
        (one, one_next), (two, two_next) = (
            _after_verify(model, prefixes[base], [*true[:keep], *tail], keep, following)
            for tail in tails
        )
        assert one.keys() == two.keys()
        for name in one:
            assert np.array_equal(one[name], two[name]), (keep, name)
        assert np.array_equal(one_next, two_next), keep


@pytest.mark.parametrize("base", [15, 63, 79])
def test_kept_rows_equal_rows_that_were_never_drafted(model, prefixes, sequence, one_by_one, base):
    """A roll back that is the same for all tails and wrong for all of them."""
    for keep in range(1, 17):
        ids = [*sequence[base : base + keep], *[EOS_ID] * (16 - keep)]
        end = base + keep
        _, got = _after_verify(model, prefixes[base], ids, keep, sequence[end : end + 18])
        assert np.abs(got - one_by_one[end : end + 18]).max() < CLOSE


def test_part_of_a_forward_of_several_chunks_can_be_kept(model, prefixes, sequence, one_by_one):
    """A replay that stops at the first chunk."""
    for keep in (10, 16, 17, 32, 39):
        ids, end = [*sequence[17 : 17 + keep], *[9] * (40 - keep)], 17 + keep
        _, got = _after_verify(model, prefixes[17], ids, keep, sequence[end : end + 3])
        assert np.abs(got - one_by_one[end : end + 3]).max() < CLOSE


def test_twenty_rounds_in_a_row_equal_one_by_one(model, sequence, one_by_one):
    """A drift that a single round is too short to show."""
    rng, state = np.random.default_rng(5), model.new_state()
    got, at = [feed(model, state, sequence[:40])], 40
    for _ in range(20):
        keep = int(rng.integers(1, 9))
        tail = rng.integers(8, 310, 16 - keep)
        tail[:1] = EOS_ID
        ids = [*sequence[at : at + keep].tolist(), *tail]
        logits = model.logits(run_rows(model, ids, state))
        mx.eval(logits, *state.arrays())
        got.append(np.array(logits)[:keep])
        commit(state, keep)
        at += keep
    assert at > 100
    assert np.abs(np.concatenate(got) - one_by_one[:at]).max() < CLOSE


def test_abandoned_forward_changes_nothing(model, prefixes):
    """Keep 0 after a fault must leave the session able to go on."""
    state = fork(prefixes[79])
    before = arrays_of(state)
    mx.eval(run_rows(model, [9, 10, 11, 12], state), *state.arrays())
    commit(state, 0)
    after = arrays_of(state)
    assert state.base == 79
    assert all(np.array_equal(before[name], after[name]) for name in before)


def _keep_all(piece, rows):
    real = piece.roll_back
    piece.roll_back = lambda _keep: real(rows)


def _keep_pooled(piece, rows):
    """Cut the raw rows of the open pool, and leave the pooled keys as long as they are."""
    real, keys = piece.roll_back, piece._keys
    piece.roll_back = lambda keep: (keys.roll_back(keys.captured), real(keep))


def _keep_raw(piece, rows):
    """Cut the pooled keys, and leave the raw rows that the whole forward left open."""

    def roll_back(keep):
        seen = piece._seen
        real(keep)
        piece.open = seen[seen.shape[0] // 16 * 16 :]

    real = piece.roll_back
    piece.roll_back = roll_back


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("recurrent", _keep_all),
        ("0.window", _keep_all),
        ("3.window", _keep_all),
        ("2.latents", _keep_all),
        ("4.latents", _keep_all),
        ("2.pools", _keep_all),
        ("4.pools", _keep_pooled),
        ("4.pools", _keep_raw),
    ],
)
def test_a_piece_that_is_not_rolled_back_is_noticed(model, prefixes, sequence, name, plant):
    """The tests above must be able to fail for every kind of state."""
    base, keep, rows = 60, 2, 8  # a wrong row fills the pool
    ids = [*sequence[base : base + keep].tolist(), *range(100, 100 + rows - keep)]
    following = sequence[base + keep : base + keep + 48]
    _, wanted = _after_verify(model, prefixes[base], ids, keep, following)
    state = fork(prefixes[base])
    piece = state.pieces[name]
    plant(piece, rows)
    mx.eval(run_rows(model, ids, state), *state.arrays())
    commit(state, keep)
    del piece.roll_back
    try:
        got = feed(model, state, following)
    except ValueError:  # a buffer that is too long no longer fits the mask
        return
    assert np.abs(got - wanted).max() > 1e-3


def test_a_pool_without_its_key_is_refused_before_anything_changes(model, prefixes):
    """A full pool whose raw rows would be thrown away unpooled."""
    state = fork(prefixes[63])
    before = arrays_of(state)
    mx.eval(run_rows(model, [9, 10, 11], state))
    state.pieces["4.pools"]._keys.roll_back(0)
    with pytest.raises(RollBackRefused, match="0 pooled keys captured for 1 full pools"):
        commit(state, 2)
    after = arrays_of(state)
    for name in before:
        if "keys" not in name:
            assert np.array_equal(before[name], after[name]), name


def test_a_long_forward_keeps_all_or_none(model):
    """Prefill rows are never half accepted; asking for it must not return wrong state."""
    state = model.new_state()
    mx.eval(run_rows(model, list(range(8, 108)), state))
    with pytest.raises(RollBackRefused, match="keeps all or none"):
        commit(state, 50)
    commit(state, 100)
    assert state.base == 100


# --------------------------------------------------------------------------- loading


@pytest.mark.parametrize("modes", [(0, False, False), (2, True, True)])
def test_a_session_of_this_family_continues_as_one_row_steps_do(folder, model, sequence, modes):
    """A family that runs alone but not through the engine: prefill, builds ahead, acceptance."""
    layers, is_deferred, prebuilds = modes
    options = EngineOptions(
        prefill_chunk=32, pipeline_layers=layers, is_deferred=is_deferred, prebuilds=prebuilds
    )
    session = load_engine(folder, None, options).open(Sampling(), taps=False)
    for _ in session.prefill(sequence[:77].tolist()):
        pass
    wanted, state = [], model.new_state()
    logits = feed(model, state, sequence[:77])
    for _ in range(30):
        wanted.append(int(logits[-1].argmax()))
        logits = feed(model, state, wanted[-1:])
    got, accepted = [session.anchor_id], []
    while len(got) < 30:
        right = wanted[len(got) : len(got) + len(accepted) % 8]
        verdict = session.verify([*right, *[9] * (7 - len(right))], 8)
        got += verdict.ids
        accepted.append(verdict.n_accepted)
    assert got[:30] == wanted
    assert min(accepted) == 0
    assert max(accepted) >= 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim 64; only 0 is implemented"),
        ({"indexer_types": ["full"] * 4 + ["shared"]}, r"'shared' at layers \[4\]"),
        ({"indexer_types": None, "index_topk_freq": 2}, r"'shared' at layers"),
        ({"n_group": 2}, "n_group 2; only 1"),
        ({"linear_lower_bound": None}, "linear_lower_bound None"),
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail False"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"index_topk": 50}, "index_topk 50"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types has 4 entries"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(fields, message):
    """A checkpoint that would load and compute something else."""
    with pytest.raises(ModelMismatch, match=message):
        ModelArgs.from_config(tiny_config(**fields))


def test_a_missing_field_is_named():
    """A KeyError without the file it came from."""
    config = tiny_config()
    del config["text_config"]["kv_lora_rank"]
    with pytest.raises(ModelMismatch, match="lacks 'kv_lora_rank'"):
        ModelArgs.from_config(config)


def test_published_patterns_are_the_default():
    """A config that leaves out its layer lists, as the released one may."""
    text = tiny_config(num_hidden_layers=45)["text_config"]
    for field in ("layer_types", "mlp_layer_types", "indexer_types", "hc_eps", "index_topk"):
        del text[field]
    args = ModelArgs.from_config(text)
    attention = [i for i, kind in enumerate(args.layer_types) if kind == "full_attention"]
    assert attention == list(range(3, 45, 4))
    assert args.mlp_types.index("sparse") == 3
    assert (args.streams.eps, args.index.kept_pools) == (1e-6, 128)


def test_flat_names_and_stacked_experts_load_the_same_network(folder, tmp_path, sequence):
    """A text-only checkpoint: no `language_model` in names, text fields at the config's root."""
    tensors = random_weights(TEXT, seed=0)
    stacked = {}
    for at in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        parts = {
            part: np.stack(
                [tensors.pop(f"{at}.experts.{expert}.{part}_proj.weight") for expert in range(8)]
            )
            for part in ("gate", "up", "down")
        }
        stacked[at + ".experts.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
        stacked[at + ".experts.down_proj"] = parts["down"]
    flat = {name.replace(PREFIX, "model."): value for name, value in (tensors | stacked).items()}
    write_sharded(tmp_path, flat, dtype="F32", shards=2)
    (tmp_path / "config.json").write_text(json.dumps({**TEXT, "model_type": "glm5_next"}))
    published, other = (feed_parts(load(at), [sequence]) for at in (folder, tmp_path))
    assert (published == other).all()


def test_mtp_and_vision_tensors_are_dropped_by_name_and_others_are_not(tmp_path):
    """A stray tensor that is skipped in silence, or an MTP layer that stops the load."""
    extra = {
        PREFIX + "layers.5.eh_proj.weight": np.zeros((2, 2), np.float32),
        "model.visual.merger.weight": np.zeros((2, 2), np.float32),
    }
    load(make_tiny_glm5_next(tmp_path / "published", extra=extra))
    extra = {PREFIX + "layers.6.eh_proj.weight": np.zeros((2, 2), np.float32)}
    with pytest.raises(ModelMismatch, match=r"1 unexpected: .*layers\.6\.eh_proj"):
        load(make_tiny_glm5_next(tmp_path / "stray", extra=extra))
