"""Sampling parameters: honoured or refused by name."""

import pytest

from common.errors import BadRequest
from common.sampling import SamplingParams, derived_seed, draw_seed, is_lossy
from common.wire.messages import Sampling


@pytest.mark.parametrize(
    "given",
    [
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"max_tokens": True},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": "0"},
        {"temperature": 1e-310},
        {"temperature": 10**400},
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


def test_seeds_of_further_completions_differ_and_repeat():
    """Two completions with one noise are one completion."""
    seeds = [derived_seed(7, index) for index in range(64)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 64
    assert seeds == [derived_seed(7, index) for index in range(64)]
    assert all(SamplingParams(seed=seed).seed == seed for seed in seeds)
    assert not set(seeds[1:]) & {derived_seed(8, index) for index in range(64)}


@pytest.mark.parametrize(
    ("acceptance", "temperature", "lossy"),
    [
        ("exact", 1.0, False),
        ("residual", 1.0, False),
        ("typical", 1.0, True),
        ("cascade", 0.7, True),
        ("typical", 0.0, False),
        ("cascade", 0.0, False),
    ],
)
def test_only_drafts_that_change_the_output_make_a_reply_lossy(acceptance, temperature, lossy):
    """The label is what tells a user that the text is not the target's own."""
    assert is_lossy(SamplingParams(acceptance=acceptance, temperature=temperature)) is lossy
