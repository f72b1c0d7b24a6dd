"""The trainable target: its formulas, its incremental form, and the reference implementation."""

import importlib.util
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch (extra `train`) is not installed")

from support.trainer_cases import SMALL, random_target  # noqa: E402

from drafter_svc.train.delta_rule import delta_rule_chunked, delta_rule_step  # noqa: E402
from drafter_svc.train.export import read_target, target_config, write_target  # noqa: E402
from drafter_svc.train.ngram import layer_multipliers  # noqa: E402

torch.set_num_threads(1)


def random_rule(length: int) -> list["torch.Tensor"]:
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 3, length, 8, generator=g) for _ in range(3))
    k[:, :, 5:] = k[:, :, 4:5]  # repeated tokens have parallel keys
    k = torch.nn.functional.normalize(k, dim=-1)
    beta = torch.rand(2, 3, length, generator=g)
    return [q, k, v, beta, -torch.rand(2, 3, length, generator=g) * 0.05]


@pytest.mark.parametrize("length", [1, 63, 64, 150])
def test_chunks_equal_the_recurrence(length: int) -> None:
    """A chunked form that is only nearly right trains a model that decodes differently."""
    parts = random_rule(length)
    state = torch.zeros(2, 3, 8, 8)
    rows = [delta_rule_step(*(t[:, :, i] for t in parts), state) for i in range(length)]
    out, last = delta_rule_chunked(*parts)
    torch.testing.assert_close(out, torch.stack(rows, 2), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(last, state, atol=2e-5, rtol=1e-4)


def test_the_gradient_of_the_chunks_is_that_of_the_recurrence() -> None:
    """The inverse has a hand-written gradient."""
    parts = [t.double().requires_grad_() for t in random_rule(9)]
    assert torch.autograd.gradcheck(lambda *p: delta_rule_chunked(*p, chunk=4)[0], parts)


@pytest.mark.parametrize("sparse", [True, False])
def test_decoding_token_by_token_equals_one_pass(sparse: bool) -> None:
    """A window or cache that is off by one would make regenerated text another model's text."""
    net = random_target()
    net.select(sparse=sparse)
    ids = torch.randint(2, 128, (2, 90), generator=torch.Generator().manual_seed(0))
    ids[0, 40] = ids[0, 41] = SMALL.eos_token_id
    with torch.no_grad():
        whole = net(ids).hidden
        state = net.new_state(90)
        rows = [net(ids[:, :33], state=state).hidden]
        rows += [net(ids[:, i : i + 1], state=state).hidden for i in range(33, 90)]
    torch.testing.assert_close(torch.cat(rows, 1), whole, atol=2e-5, rtol=1e-4)


def test_a_written_target_reads_back(tmp_path) -> None:
    """Shards of the table in the wrong order still have the right shape."""
    net = random_target()
    write_target(net, tmp_path)
    back = read_target(SMALL, tmp_path)
    for name, value in net.state_dict().items():
        kept = value if name.endswith("A_log") or value.dtype == torch.int64 else value.bfloat16()
        assert torch.equal(back.state_dict()[name], kept.to(back.state_dict()[name].dtype)), name


def test_published_multipliers_come_out() -> None:
    """Another multiplier reads other rows of the table, and the loss only rises a little."""
    published = replace(SMALL, vocab_size=248320)
    assert layer_multipliers(published) == [23703573157769, 20109073645365, 8052911324071]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_written_target_has_the_logits_of_transformers(tmp_path) -> None:
    """The pair must be what the published format says, not what our own loader forgives.

    80 tokens are more than the indexer's budget of 32, so the selection is compared too; with eight
    index heads no score is exactly 0, since the reference does not say how ties fall.
    """
    if importlib.util.find_spec("transformers.models.qwen4_exp") is None:
        pytest.skip("transformers with qwen4_exp (extra `reference`) is not installed")
    import transformers

    dims = replace(SMALL, indexer_n_heads=8)
    write_target(random_target(dims), tmp_path)
    ours = read_target(dims, tmp_path).eval()
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    vision |= {"patch_size": 4, "out_hidden_size": 32, "num_position_embeddings": 16}
    fields = target_config(dims)
    del fields["architectures"], fields["model_type"]
    config = transformers.Qwen4ExpConfig(**fields, vision_config=vision)
    kind = transformers.Qwen4ExpForConditionalGeneration
    theirs = kind.from_pretrained(tmp_path, config=config, dtype=torch.float32).eval()
    ids = torch.randint(2, 128, (1, 80), generator=torch.Generator().manual_seed(0))
    ids[0, 20] = ids[0, 50] = SMALL.eos_token_id
    with torch.no_grad():
        logits = ours.logits(ours(ids).hidden)
        torch.testing.assert_close(theirs(ids).logits, logits, atol=1e-4, rtol=1e-4)
