"""Keyed draws: published numbers, the right distribution, and nothing that depends on rounds."""

import numpy as np
import pytest

from common.wire.messages import Sampling
from target_svc.distribution import draw as draw_kept
from target_svc.distribution import kept_of
from target_svc.noise import uniform


def draw(scores, sampling, position):
    """One row's draw, from its scores on."""
    return draw_kept(kept_of(scores.astype(np.float64), sampling), sampling.seed, position)


SCORES = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -3.0], np.float32)


def probabilities(scores, temperature):
    """Softmax of scores / T."""
    weights = np.exp((scores - scores.max()) / temperature)
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("seed", "position", "token", "wanted"),
    [
        (1234, 0, 0, 0.1770470440),
        (1234, 1, 0, 0.6680063903),
        (1234, 0, 1, 0.3757815659),
        (4321, 16384, 151643, 0.2848159969),
        (20260829, 7, 248070, 0.4835927784),
    ],
)
def test_noise_equals_the_published_numbers(seed, position, token, wanted):
    """A hash that no other implementation can follow."""
    assert abs(uniform(seed, position, np.array([token]))[0] - wanted) < 1e-9


def test_noise_reaches_neither_end():
    """An infinite score out of log(0)."""
    numbers = uniform(7, 3, np.arange(2_000_000))
    assert numbers.min() > 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 1e-3


def _frequencies(sampling_fields, n_draws=20_000):
    counts = np.zeros(len(SCORES))
    for position in range(n_draws):
        sampling = Sampling(seed=5, **sampling_fields)
        counts[draw(SCORES, sampling, position).token] += 1
    return counts / n_draws


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"temperature": 1.0}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 0.5, "top_k": 3}, [0, 1, 2]),
        ({"temperature": 1.0, "top_p": 0.8}, [0, 1, 2]),
        ({"temperature": 2.0, "top_k": 4, "top_p": 0.5}, [0, 1]),
    ],
)
def test_draws_follow_the_filtered_distribution(fields, kept):
    """Noise that is not Gumbel, or filters in the wrong order."""
    wanted = np.zeros(len(SCORES))
    wanted[kept] = probabilities(SCORES, fields["temperature"])[kept]
    wanted /= wanted.sum()
    got = _frequencies(fields)
    assert (got[wanted == 0] == 0).all()
    assert np.abs(got - wanted).max() < 0.015  # four standard deviations


def test_draws_depend_on_seed_and_position_alone():
    """A draw that counts how often it was asked."""
    sampling = Sampling(temperature=1.0, seed=11)
    once = [draw(SCORES, sampling, position).token for position in range(50)]
    assert once == [draw(SCORES, sampling, position).token for position in range(50)]
    other = [draw(SCORES, Sampling(temperature=1.0, seed=12), p).token for p in range(50)]
    assert once != other


def test_top_k_keeps_ties_and_top_p_cuts_them_from_the_lowest_id():
    """A filter that cuts a tie by the order of a sort."""
    flat = np.zeros(6, np.float32)
    by_k = {draw(flat, Sampling(temperature=1.0, top_k=2), p).token for p in range(200)}
    assert by_k == set(range(6))
    by_p = {draw(flat, Sampling(temperature=1.0, top_p=0.3), p).token for p in range(200)}
    assert by_p == {0, 1}


def test_an_edge_that_could_fall_the_other_way_is_reported():
    """A difference between two kernels that nobody counts."""
    close = np.array([1.0, 0.5, 0.5 - 1e-6, -9.0], np.float32)
    draws = [draw(close, Sampling(temperature=1.0, top_k=2), p) for p in range(300)]
    assert all(d.is_near_tie for d in draws if d.token == 1)
    assert not all(d.is_near_tie for d in draws)
    clear = np.array([1.0, 0.5, 0.2, -9.0], np.float32)
    near = [draw(clear, Sampling(temperature=1.0, top_k=2), p).is_near_tie for p in range(300)]
    assert sum(near) <= 3  # two sums within 1e-4 happen about once in 10,000 draws
