"""Following a share of the samples when all are too many: against dictionaries and in the mean."""

import numpy as np
import pytest

from rankscope.stats.arrays import mix
from rankscope.stats.draws import MAX_HALVINGS, DrawnSamples, SampleShare, SortedMap
from rankscope.stats.samples import SampleLedger, ThinningLedger


def drawn(*steps):
    return DrawnSamples([[np.asarray(batch, np.int64) for batch in batches] for batches in steps])


def draw(ledger, batches):
    """Return the counts of one step."""
    [followed] = ledger.observe(drawn(batches))
    return followed.counts


def count(exact, batches):
    [counts] = exact.observe(drawn(batches).sorted())
    return counts


def test_a_sorted_map_against_a_dictionary():
    rng = np.random.default_rng(0)
    ours, theirs = SortedMap(np.int32), {}
    for step in range(60):
        keys = np.unique(rng.integers(-200, 200, 20))
        ours.put(keys, np.full(len(keys), step))
        theirs.update(dict.fromkeys(keys.tolist(), step))
        if step == 30:
            ours.keep(lambda keys: keys % 3 == 0)
            theirs = {key: value for key, value in theirs.items() if key % 3 == 0}
        asked = np.arange(-210, 210)
        found, values = ours.find(asked)
        expected = [theirs.get(key) for key in asked.tolist()]
        assert [int(v) if f else None for f, v in zip(found, values, strict=True)] == expected
        assert len(ours) == len(theirs)


def test_hashes_spread_over_all_bits():
    hashes = mix(np.arange(-(1 << 15), 1 << 15))
    bits = (hashes[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 6 * 0.5 / np.sqrt(len(hashes))


@pytest.mark.parametrize("halvings", [0, 1, 5])
def test_a_share_is_nested_and_of_its_size(halvings):
    share = SampleShare()
    samples = np.arange(1 << 16)
    before = np.ones(len(samples), bool)
    for _ in range(halvings):
        share.halve()
        admitted = share.admits(samples)
        assert not (admitted & ~before).any()
        before = admitted
    p = 0.5**halvings
    error = np.sqrt(len(samples) * p * (1 - p))
    assert abs(before.sum() - len(samples) * p) <= 5 * error
    assert share.one_in == 2**halvings
    batches = [samples[:100], samples[:0], samples[100:300]]
    parts = share.of(batches)
    assert [part.tolist() for part in parts] == [b[share.admits(b)].tolist() for b in batches]


def test_a_share_has_an_end():
    share = SampleShare()
    while share.can_halve:
        share.halve()
    assert share.one_in == 2**MAX_HALVINGS


def test_the_number_of_different_samples_is_as_exact_as_it_says():
    deviations = []
    for seed in range(25):
        ledger = ThinningLedger(capacity=256)
        samples = np.random.default_rng(seed).integers(0, 1 << 62, 8_000)
        for batch in samples.reshape(40, 2, 100):
            draw(ledger, batch)
        number, error = ledger.scale_up(ledger.followed)
        assert ledger.drawn == 8_000
        assert ledger.followed <= 256
        assert error == pytest.approx(np.sqrt(8_000 * ledger.one_in), rel=0.3)
        deviations.append((number - 8_000) / error)
    assert abs(np.mean(deviations)) < 4 / np.sqrt(25)
    assert 0.5 < np.std(deviations) < 1.5


def test_up_to_its_capacity_it_counts_what_the_exact_ledger_counts():
    rng = np.random.default_rng(2)
    exact, thinning = SampleLedger(), ThinningLedger(capacity=500)
    for _ in range(200):
        batches = list(rng.integers(0, 500, (4, 6)))
        assert draw(thinning, batches) == count(exact, batches)
    assert thinning.one_in == 1
    assert thinning.followed == exact.distinct


def test_a_thinned_ledger_knows_of_its_share_what_an_exact_one_knows():
    rng = np.random.default_rng(4)
    thinning, exact, share = ThinningLedger(capacity=300), SampleLedger(), SampleShare()
    for _ in range(3):
        share.halve()
    checked = 0
    for _ in range(300):
        batches = list(rng.integers(0, 2000, (4, 6)))
        expected = count(exact, share.of(batches))
        counts = draw(thinning, batches)
        if thinning.one_in == share.one_in:
            assert counts == expected
            checked += 1
    assert checked > 100
    assert thinning.complete


def test_a_ledger_goes_on_from_its_state():
    rng = np.random.default_rng(6)
    one, other = ThinningLedger(capacity=64), ThinningLedger(capacity=64)
    for step in range(40):
        batches = list(rng.integers(0, 1000, (2, 6)))
        if step == 20:
            other.restore(one.state())
        counts = draw(one, batches)
        if step >= 20:
            assert draw(other, batches) == counts
            assert (other.one_in, other.followed) == (one.one_in, one.followed)


@pytest.mark.parametrize("capacity", [1 << 20, 1500])
def test_how_many_steps_are_taken_together_makes_no_difference(capacity):
    rng = np.random.default_rng(3)
    alone, together = ThinningLedger(capacity), ThinningLedger(capacity)
    for _ in range(60):
        order = rng.permutation(2000)[: 5 * 3 * 4].reshape(5, 3, 4)
        steps = [list(batches) for batches in order]
        if rng.random() < 0.4:
            steps[3][1] = steps[0][1]
        if rng.random() < 0.2:
            steps[2][1] = steps[2][0]
        expected = [seen for batches in steps for seen in alone.observe(drawn(batches))]
        found = list(together.observe(drawn(*steps)))
        for one, other in zip(found, expected, strict=True):
            assert one.samples.tolist() == other.samples.tolist()
            assert (one.counts, one.drawn, one.remembered) == (
                other.counts,
                other.drawn,
                other.remembered,
            )
    assert (together.one_in, together.followed) == (alone.one_in, alone.followed)
    assert (together.one_in > 1) == (capacity == 1500)


def test_steps_are_cut_where_a_sample_comes_again():
    steps = drawn([[1, 2], [2]], [[3], [4]], [[5], [1]], [[5], [6]], [[7], [8]])
    assert [len(piece) for piece in steps.pieces()] == [2, 1, 2]
    assert [steps.all_differ(index) for index in range(5)] == [False, True, True, True, True]
    assert [len(piece) for piece in drawn([[1], [2]], [[3], [4]]).pieces()] == [2]
