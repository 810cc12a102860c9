"""The ledger against dictionaries and sets, and on streams whose counts are known."""

from collections import Counter, defaultdict
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.stats.draws import DrawnSamples, SortedMap, count_common, in_order
from rankscope.stats.samples import MAX_SHARED_PAIRS, SampleLedger, identical_groups

INT64 = st.integers(-(2**63), 2**63 - 1)
streams = st.tuples(
    st.integers(1, 4), st.one_of(st.just(st.integers(0, 12)), st.just(INT64))
).flatmap(
    lambda spec: st.lists(
        st.lists(st.lists(spec[1], max_size=5), min_size=spec[0], max_size=spec[0]), max_size=12
    )
)


def as_arrays(batches):
    return [np.array(batch, np.int64) for batch in batches]


def count(ledger, batches):
    """Return the counts of one step."""
    [counts] = ledger.observe(DrawnSamples([batches]).sorted())
    return counts


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
        shared = Counter(
            pair for ranks in ranks_of.values() for pair in combinations(sorted(ranks), 2)
        )
        counts = {
            "drawn": sum(map(len, batches)),
            "distinct": len(ranks_of),
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
        counts = count(ledger, as_arrays(batches))
        assert {name: getattr(counts, name) for name in expected} == expected
        assert ledger.distinct == len(naive.owners)
        assert ledger.exact


@given(streams, st.randoms(use_true_random=False))
def test_renaming_the_workers_renames_them_in_the_counts_only(stream, random):
    order = list(range(len(stream[0]))) if stream else []
    random.shuffle(order)
    one, other = SampleLedger(), SampleLedger()
    for batches in stream:
        a = count(one, as_arrays(batches))
        b = count(other, as_arrays([batches[rank] for rank in order]))
        for name in ("drawn", "distinct", "new", "repeated_own", "repeated_cross", "shared"):
            assert getattr(a, name) == getattr(b, name)
        renamed = [(*sorted((order[i], order[j])), number) for i, j, number in b.shared_between]
        assert sorted(renamed) == sorted(a.shared_between)


def test_beyond_its_capacity_the_ledger_gives_a_lower_bound_and_accuses_nobody():
    ledger = SampleLedger(capacity=100)
    for step in range(10):
        batch = np.arange(step * 20, step * 20 + 20)
        count(ledger, [batch[:10], batch[10:]])
        assert ledger.exact == (step < 5)
    assert ledger.distinct == 100


def test_repeats_whose_owner_is_forgotten_count_as_own():
    ledger = SampleLedger(capacity=4)  # remembers 16 pairs of a sample and a worker
    for step in range(30):
        batches = [np.empty(0, np.int64)] * 30
        batches[step] = np.arange(4)
        counts = count(ledger, batches)
        expected = (0, 0) if step == 0 else (0, 4) if step < 5 else (4, 0)
        assert (counts.repeated_own, counts.repeated_cross) == expected
    assert ledger.exact


def test_a_long_stream_stays_exact():
    rng = np.random.default_rng(5)
    ledger, seen = SampleLedger(), set()
    for _ in range(400):
        batches = list(rng.integers(0, 3000, (8, 4)))
        fresh = {int(x) for batch in batches for x in batch} - seen
        assert count(ledger, batches).new == len(fresh)
        seen |= fresh
    assert ledger.distinct == len(seen)


def test_a_thousand_workers_with_one_batch_list_few_pairs():
    batches = [np.arange(8)] * 1024
    counts = count(SampleLedger(), batches)
    assert counts.distinct == 8
    assert identical_groups(batches) == (tuple(range(1024)),)
    assert len(counts.shared_between) == MAX_SHARED_PAIRS
    assert all(i < j and count <= 8 for i, j, count in counts.shared_between)


@pytest.mark.parametrize(
    ("batches", "groups"),
    [
        ([[1, 2], [2, 1], [1, 2, 2]], ((0, 1),)),
        ([[], []], ()),
        ([[7]], ()),
        ([[1], [2], [1], [2], [3]], ((0, 2), (1, 3))),
        ([[1, 1, 2], [1, 2, 2]], ()),
        ([[3, 1], [2, 1], [1, 3], [1, 2]], ((0, 2), (1, 3))),
    ],
)
def test_identical_batches_are_equal_as_multisets(batches, groups):
    assert identical_groups(as_arrays(batches)) == groups


def test_no_workers_draw_nothing():
    assert count(SampleLedger(), []).drawn == 0


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
