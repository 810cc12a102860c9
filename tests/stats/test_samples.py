"""The ledger against dictionaries and sets, and on streams whose counts are known."""

from collections import Counter, defaultdict
from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.stats.draws import DrawnSamples, SampleShare, SortedMap, count_common, in_order
from rankscope.stats.samples import SampleLedger, ThinningLedger

INT64 = st.integers(-(2**63), 2**63 - 1)
streams = st.tuples(
    st.integers(1, 4), st.one_of(st.just(st.integers(0, 12)), st.just(INT64))
).flatmap(
    lambda spec: st.lists(
        st.lists(st.lists(spec[1], max_size=5), min_size=spec[0], max_size=spec[0]), max_size=12
    )
)


def drawn(*steps):
    return DrawnSamples([[np.asarray(batch, np.int64) for batch in batches] for batches in steps])


class NaiveLedger:
    def __init__(self):
        self.owners = defaultdict(set)
        self.first_owner = {}
        self.crossed = set()

    def observe(self, batches):
        ranks_of = defaultdict(set)
        for rank, batch in enumerate(batches):
            for sample in batch:
                ranks_of[sample].add(rank)
        own = cross = 0
        crossing = Counter()
        for sample, ranks in ranks_of.items():
            for rank in sorted(ranks):
                own += rank in self.owners[sample]
                if self.owners[sample] and rank not in self.owners[sample]:
                    cross += 1
                    if sample not in self.crossed:
                        crossing.update([rank, self.first_owner[sample]])
                        self.crossed.add(sample)
        pairs = (combinations(sorted(ranks), 2) for ranks in ranks_of.values())
        shared = Counter(chain.from_iterable(pairs))
        counts = {
            "drawn": sum(map(len, batches)),
            "new": sum(not self.owners[sample] for sample in ranks_of),
            "repeated_own": own,
            "repeated_cross": cross,
            "crossing_by_rank": tuple(crossing[rank] for rank in range(len(batches))),
            "repeated_in_batch": sum(len(batch) - len(set(batch)) for batch in batches),
            "shared": sum(len(ranks) > 1 for ranks in ranks_of.values()),
            "shared_between": tuple((*pair, shared[pair]) for pair in sorted(shared)),
        }
        for sample, ranks in ranks_of.items():
            self.owners[sample] |= ranks
            self.first_owner.setdefault(sample, min(ranks))
        return counts


@given(streams)
def test_counts_agree_with_dictionaries(stream):
    naive, ledger = NaiveLedger(), SampleLedger()
    for batches in stream:
        expected = naive.observe(batches)
        [counts] = ledger.observe(drawn(batches).sorted())
        assert {name: getattr(counts, name) for name in expected} == expected
        assert ledger.distinct == len(naive.owners)
        assert ledger.exact


@pytest.mark.parametrize("num_keys", [1, 40])
def test_a_map_agrees_with_a_dict_however_it_is_filled(num_keys):
    rng, truth, one = np.random.default_rng(num_keys), {}, SortedMap(np.int32)
    for step in range(200):
        keys = in_order(rng.integers(-150, 150, num_keys))
        before = [truth.get(key) for key in keys.tolist()]
        if num_keys == 1:
            assert one.get(int(keys[0])) == before[0]
            one.put_one(int(keys[0]), step)
        else:
            found, values = one.put(keys, np.full(len(keys), step, np.int32))
            assert [v if f else None for f, v in zip(found, values, strict=True)] == before
        truth.update(dict.fromkeys(keys.tolist(), step))
        assert len(one) == len(truth)
    everything = np.arange(-200, 200)
    found, values = one.find(everything)
    assert dict(zip(everything[found].tolist(), values[found].tolist(), strict=True)) == truth
    assert count_common(everything, np.array(list(truth))) == len(truth)


@pytest.mark.parametrize("halvings", [1, 5])
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
    assert abs(before.sum() - len(samples) * p) <= 5 * np.sqrt(len(samples) * p * (1 - p))
    assert share.one_in == 2**halvings


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
            for name in ("counts", "drawn", "remembered"):
                assert getattr(one, name) == getattr(other, name)
    assert together.one_in == alone.one_in
    assert (together.one_in > 1) == (capacity == 1500)
