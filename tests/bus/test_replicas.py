"""What differs between workers that should hold the same, against pairs compared one by one."""

import numpy as np
import pytest

from rankscope.bus.replicas import StateDigests, StateKind, differences

KINDS = tuple(StateKind)


def made(num_items):
    kinds = tuple(KINDS[d % len(KINDS)] for d in range(num_items))
    names = tuple(f"layer.{d}" for d in range(num_items))
    return StateDigests(kinds, names)


@pytest.mark.parametrize("replicas", [[0, 0, 0, 0], [1, 0, 1, 0], [0, 1, 2, 3], [2, 2, 2, 5]])
@pytest.mark.parametrize("seed", range(20))
def test_only_workers_that_should_hold_the_same_are_compared(replicas, seed):
    rng = np.random.default_rng(seed)
    own = made(40)
    digests_WD = np.repeat(rng.integers(1, 19, (1, 40)), 4, axis=0)
    for _ in range(seed):
        digests_WD[rng.integers(4), rng.integers(40)] += 1
    unchanged_WD = rng.random((4, 40)) < 0.5
    expected = []
    for kind in StateKind:
        found = [
            name
            for d, name in enumerate(own.names)
            if own.kinds[d] is kind
            and any(
                digests_WD[a, d] != digests_WD[b, d]
                for a in range(4)
                for b in range(4)
                if kind is StateKind.BUFFER or replicas[a] == replicas[b]
            )
        ]
        expected += found
    told = differences(own, digests_WD, unchanged_WD, np.array(replicas))
    assert [difference.name for difference in told] == expected
    for difference in told:
        d = own.names.index(difference.name)
        assert (difference.digests_W == digests_WD[:, d]).all()
        frozen = difference.kind is StateKind.PARAMETER  # no item is its gradient
        assert (difference.unchanged_W == (unchanged_WD[:, d] | frozen)).all()


def test_the_digest_of_items_tells_kinds_and_names_apart():
    one = StateDigests((StateKind.PARAMETER,), ("a",))
    assert one.items == StateDigests((StateKind.PARAMETER,), ("a",)).items
    assert one.items != StateDigests((StateKind.BUFFER,), ("a",)).items
    assert one.items != StateDigests((StateKind.PARAMETER,), ("b",)).items
    assert 0 <= one.items < 2**63
