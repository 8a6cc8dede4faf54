"""Random numbers that depend on their key and nothing else."""

import numpy as np
from scipy import stats

from fathoms.data.counter_rng import generator, normals, sample_keys, uniforms


def test_a_sample_draws_the_same_numbers_in_any_batch_and_order():
    index = np.arange(100)
    together = uniforms(sample_keys(7, 3, "crop", index), 5)
    shuffled = np.random.default_rng(0).permutation(100)
    assert (uniforms(sample_keys(7, 3, "crop", shuffled), 5) == together[shuffled]).all()
    assert (uniforms(sample_keys(7, 3, "crop", [42]), 5)[0] == together[42]).all()


def test_every_part_of_the_key_matters():
    base = sample_keys(1, 2, "crop", [3], [0])[0]
    others = [
        sample_keys(2, 2, "crop", [3], [0])[0],
        sample_keys(1, 3, "crop", [3], [0])[0],
        sample_keys(1, 2, "policy", [3], [0])[0],
        sample_keys(1, 2, "crop", [4], [0])[0],
        sample_keys(1, 2, "crop", [3], [1])[0],
    ]
    assert len({int(base), *map(int, others)}) == 6


def test_draws_are_uniform_and_neighbours_are_not_correlated():
    draws = uniforms(sample_keys(0, 0, "policy", np.arange(20_000)), 4)
    assert draws.min() >= 0
    assert draws.max() < 1
    for column in range(4):
        assert stats.kstest(draws[:, column], "uniform").pvalue > 1e-3
    # 20,000 pairs: a correlation of 0.03 would be more than four standard errors.
    assert abs(np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]) < 0.03
    assert np.abs(np.corrcoef(draws.T) - np.eye(4)).max() < 0.03


def test_normals_are_normal():
    draws = uniforms(sample_keys(0, 0, "policy", np.arange(20_000)), 2)
    assert stats.kstest(normals(draws[:, 0], draws[:, 1]), "norm").pvalue > 1e-3


def test_batch_generators_differ_by_step_and_rank():
    first = generator(0, 0, "mix", 1, 0).random(4)
    assert (first == generator(0, 0, "mix", 1, 0).random(4)).all()
    assert (first != generator(0, 0, "mix", 2, 0).random(4)).all()
    assert (first != generator(0, 0, "mix", 1, 1).random(4)).all()
