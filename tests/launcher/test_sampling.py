"""Sampling parameters: honoured or refused by name."""

import pytest

from common.errors import BadRequest, Unsupported
from common.sampling import SamplingParams, draw_seed
from common.wire.messages import Sampling


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"acceptance": "residual"}, "acceptance: 'residual'"),
        ({"acceptance": "typical"}, "acceptance: 'typical'"),
        ({"acceptance": "cascade"}, "acceptance: 'cascade'"),
        ({"min_p": 0.1}, "min_p: 0.1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty: 1.1"),
        ({"presence_penalty": 0.5}, "presence_penalty: 0.5"),
        ({"frequency_penalty": 0.5}, "frequency_penalty: 0.5"),
        ({"bias_ids": (3,), "bias_values": (1.0,)}, "bias_ids: "),
        ({"stop_ids": (3,)}, "stop_ids: "),
        ({"stop": ("x",)}, "stop: "),
        ({"logprobs": 0}, "logprobs: 0"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(given, name):
    """A parameter that is accepted and ignored changes the output behind the user's back."""
    with pytest.raises(Unsupported, match=name) as caught:
        SamplingParams(**given)
    assert "supported:" in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"max_tokens": True},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": "0"},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_k": -1},
        {"seed": -1},
        {"seed": 2**63},
        {"acceptance": "lucky"},
        {"ignore_eos": 1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 2.5},
        {"frequency_penalty": float("nan")},
        {"bias_values": (1.0,)},
        {"stop_ids": (-1,)},
        {"stop": ("",)},
        {"stop": "text"},
        {"logprobs": 21},
        {"typical_delta": 0.0},
        {"typical_epsilon": 1.5},
        {"cascade_alpha": -0.1},
    ],
)
def test_values_out_of_range_are_refused_by_name(given):
    """The message names the parameter, its value and what would be right."""
    (name,) = given
    with pytest.raises(BadRequest, match=name):
        SamplingParams(**given)


def test_wire_and_parameters_have_the_same_fields():
    """A field that only one of them has would be dropped on the way."""
    params = SamplingParams(max_tokens=7, top_p=0.5, top_k=3, seed=9, ignore_eos=True)
    assert SamplingParams.of(Sampling(**params.as_fields())) == params
    assert Sampling() == Sampling(**SamplingParams().as_fields())


def test_drawn_seeds_are_valid_and_differ():
    """Sixteen equal draws of 31 bits: odds 2^-465."""
    seeds = {draw_seed() for _ in range(16)}
    assert len(seeds) > 1
    assert all(SamplingParams(seed=seed).seed == seed for seed in seeds)
