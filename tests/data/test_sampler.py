"""The order of samples is a function of counters; ranks share it out without gaps or doubles."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fathoms.data import DataError, Sampler
from fathoms.errors import ConfigError


@given(size=st.integers(8, 300), world=st.integers(1, 4), batch=st.integers(1, 8), epoch=st.integers(0, 5))
def test_ranks_share_out_each_global_batch(size, world, batch, epoch):
    if size < world * batch:
        return
    whole = Sampler(size, world * batch, seed=1)
    ranks = [Sampler(size, batch, seed=1, world=world, rank=rank) for rank in range(world)]
    assert {sampler.batches for sampler in ranks} == {whole.batches}
    for number in range(whole.batches):
        together = np.sort(np.concatenate([sampler.batch(epoch, number).index for sampler in ranks]))
        assert (together == np.sort(whole.batch(epoch, number).index)).all()


@given(size=st.integers(1, 100), world=st.integers(1, 5), batch=st.integers(1, 9))
def test_evaluation_visits_every_sample_exactly_once(size, world, batch):
    seen = []
    for rank in range(world):
        sampler = Sampler(size, batch, order="sequential", world=world, rank=rank)
        seen += [sampler.batch(0, number).index for number in range(sampler.batches)]
    assert sorted(np.concatenate(seen)) == list(range(size))


def test_an_epoch_can_be_entered_anywhere_and_epochs_differ():
    sampler, again = Sampler(100, 7, seed=5), Sampler(100, 7, seed=5)
    again.batch(4, 2)
    assert (sampler.batch(3, 9).index == again.batch(3, 9).index).all()
    assert (sampler.batch(3, 9).index != sampler.batch(4, 9).index).any()
    assert (sampler.batch(3, 9).index != Sampler(100, 7, seed=6).batch(3, 9).index).any()
    seen = np.concatenate([sampler.batch(0, number).index for number in range(sampler.batches)])
    assert len(set(seen)) == len(seen) == 98


def test_repeated_augmentation_repeats_samples_with_their_own_number():
    sampler = Sampler(90, 9, aug_repeats=3)
    refs = [sampler.batch(0, number) for number in range(sampler.batches)]
    index, repeat = np.concatenate([r.index for r in refs]), np.concatenate([r.repeat for r in refs])
    assert sampler.batches == 10
    assert len(set(index)) == 30
    assert (np.unique(index, return_counts=True)[1] == 3).all()
    assert len(set(zip(index, repeat, strict=True))) == 90
    # Over three ranks, the three views of a sample fall on three ranks.
    ranks = [Sampler(90, 3, aug_repeats=3, world=3, rank=r).batch(0, 0) for r in range(3)]
    assert all((ranks[0].index == other.index).all() for other in ranks[1:])
    assert [int(r.repeat[0]) for r in ranks] == [0, 1, 2]


def test_partners_in_mixing_are_the_same_for_any_number_of_ranks():
    def pairs(world):
        ranks = [Sampler(48, 12 // world, seed=1, world=world, rank=rank) for rank in range(world)]
        shares = [sampler.batch(0, 0).index for sampler in ranks]
        return {frozenset(pair) for share in shares for pair in zip(share, share[::-1], strict=True)}

    assert len(pairs(1)) == 6
    assert pairs(1) == pairs(2) == pairs(3)


def test_impossible_samplers_are_refused_with_the_numbers():
    with pytest.raises(
        DataError, match=r"20 samples do not fill one batch of 8 x 4 ranks; use a batch size of at most 5"
    ):
        Sampler(20, 8, world=4)
    with pytest.raises(DataError, match="empty"):
        Sampler(0, 8)
    with pytest.raises(ConfigError, match="rank=4"):
        Sampler(100, 8, world=4, rank=4)
    with pytest.raises(ConfigError, match="--aug-repeats 3: has no meaning"):
        Sampler(100, 8, order="sequential", aug_repeats=3)
    with pytest.raises(ConfigError, match="outside the epoch of 12 batches"):
        Sampler(100, 8).batch(0, 12)
