import itertools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.errors import UsageError
from rankscope.lab.numerics import summation
from rankscope.lab.numerics.gradients import GradientKind, LocalGradients, synthetic
from rankscope.lab.numerics.spread import SumOptions, measure
from rankscope.lab.numerics.summation import Arithmetic, Scheme, reduce_buffers, to_buffers
from rankscope.stats.rounding import ulp_distance

TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ARITHMETICS = [
    Arithmetic(inputs, sums)
    for inputs in summation.TYPES
    for sums in dict.fromkeys(("float32", inputs))
]
BUCKET = 5


def gradients(num_workers, num_elements, seed, spread=3.0):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((num_workers, num_elements))
    return (values * 10.0 ** rng.uniform(-spread, 0, values.shape)).astype(np.float32)


def reduce_mean(values_WN, scheme=Scheme.SEQUENTIAL, arithmetic=None, order=None):
    arithmetic = arithmetic or Arithmetic()
    return reduce_buffers(to_buffers(values_WN, arithmetic), scheme, arithmetic, order)


def exact_sums(values_WN):
    return np.array([math.fsum(column) for column in values_WN.T.astype(np.float64).tolist()])


def order_of(scheme, num_workers, num_elements, rng):
    if scheme is Scheme.ARRIVAL:
        count = summation.num_buckets(num_elements, BUCKET)
        return np.stack([rng.permutation(num_workers) for _ in range(count)])
    return rng.permutation(num_workers)


def in_words_of_torch(values_WN, scheme, arithmetic, order):
    """Add up element by element with torch's own scalars of each type."""
    num_workers, num_elements = values_WN.shape
    inputs, sums = TORCH[arithmetic.inputs], TORCH[arithmetic.sums]
    buffers = (torch.from_numpy(values_WN).to(inputs) / num_workers).to(sums)
    means = []
    for element in range(num_elements):
        own = order
        if scheme is Scheme.ARRIVAL:
            own = order[element // BUCKET]
        if scheme is Scheme.RING:
            first = element * num_workers // num_elements
            own = [*order[first:], *order[:first]]
        total = ADDED[scheme]([buffers[worker, element] for worker in own])
        assert total.dtype is sums
        means.append(float(total.to(inputs)))
    return np.array(means, dtype=np.float32)


def chain(terms):
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def tree(terms):
    if len(terms) == 1:
        return terms[0]
    width = 1 << ((len(terms) - 1).bit_length() - 1)
    return tree(terms[:width]) + tree(terms[width:])


def halving(terms):
    if len(terms) == 1:
        return terms[0]
    width = 1 << (len(terms).bit_length() - 1)
    if width < len(terms):
        first = [a + b for a, b in zip(terms, terms[width:], strict=False)]
        return halving([*first, *terms[len(first) : width]])
    half = width // 2
    return halving([a + b for a, b in zip(terms[:half], terms[half:], strict=True)])


ADDED = {**dict.fromkeys(Scheme, chain), Scheme.TREE: tree, Scheme.HALVING: halving}


def same_bits(first, second):
    return np.array_equal(first.view(np.int32), second.view(np.int32))


@pytest.mark.parametrize("scheme", Scheme)
@settings(max_examples=15, deadline=None)
@given(
    num_workers=st.integers(2, 11),
    num_elements=st.integers(1, 23),
    arithmetic=st.sampled_from(ARITHMETICS),
    seed=st.integers(0, 2**32 - 1),
)
def test_bits_equal_those_of_torchs_numbers(scheme, num_workers, num_elements, arithmetic, seed):
    values = gradients(num_workers, num_elements, seed)
    order = order_of(scheme, num_workers, num_elements, np.random.default_rng(seed))
    buffers = to_buffers(values, arithmetic)
    got = reduce_buffers(buffers, scheme, arithmetic, order, bucket_elements=BUCKET)
    assert same_bits(got, in_words_of_torch(values, scheme, arithmetic, order))


@pytest.mark.parametrize("scheme", Scheme)
@settings(max_examples=25, deadline=None)
@given(
    num_workers=st.integers(2, 64),
    arithmetic=st.sampled_from(ARITHMETICS),
    spread=st.floats(0, 8),
    cancels=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_error_is_larger_than_the_bound(scheme, num_workers, arithmetic, spread, cancels, seed):
    values = gradients(num_workers, 40, seed, spread)
    if cancels:
        values -= values.mean(axis=0)
    order = order_of(scheme, num_workers, 40, np.random.default_rng(seed))
    buffers = to_buffers(values, arithmetic)
    got = reduce_buffers(buffers, scheme, arithmetic, order, bucket_elements=BUCKET)
    exact = exact_sums(values) / num_workers
    sizes = np.abs(values).mean(axis=0, dtype=np.float64)
    bound = summation.worst_factor(num_workers, scheme, arithmetic) * sizes
    bound += summation.worst_underflow(num_workers, arithmetic)
    assert (np.abs(got - exact) <= bound * (1 + 1e-9)).all()


def local(values, name="a"):
    return LocalGradients("file", "test", {name: np.asarray(values, np.float32)})


def cells_of(measured, **wanted):
    return [cell for cell in measured["cells"] if all(cell[key] == v for key, v in wanted.items())]


@pytest.mark.parametrize("scheme", [Scheme.SEQUENTIAL, Scheme.TREE])
def test_all_orders_of_four_workers_are_counted_as_a_loop_counts_them(scheme):
    values = np.random.default_rng(0).standard_normal((4, 50)).astype(np.float32)
    options = SumOptions(workers=(4,), types=("float32",))
    [cell] = cells_of(measure(local(values), options), algorithm=str(scheme))
    orders = map(np.array, itertools.permutations(range(4)))
    results = np.stack([reduce_mean(values, scheme, order=order) for order in orders])
    truth = exact_sums(values) / 4
    norm = np.linalg.norm(truth)
    low, high = results.min(axis=0), results.max(axis=0)
    pairs = list(itertools.permutations(results.astype(np.float64), 2))
    apart = np.sqrt(np.mean([np.sum((a - b) ** 2) for a, b in pairs]))
    errors = np.sqrt(np.mean([np.sum((row - truth) ** 2) for row in results.astype(np.float64)]))
    distinct = [len(set(column.tolist())) for column in results.T]
    ulps = ulp_distance(low, high)
    assert (cell["num_orders"], cell["all_orders"]) == (24, True)
    assert cell["distinct_results"] == len({tuple(row) for row in results.tolist()})
    assert cell["distinct_per_element"]["mean"] == pytest.approx(np.mean(distinct))
    assert cell["distinct_per_element"]["largest"] == max(distinct)
    assert cell["share_differing"] == pytest.approx(np.mean(low != high))
    assert cell["spread_ulp"]["median"] == np.median(ulps)
    assert cell["spread_ulp"]["largest"] == ulps.max()
    assert cell["spread_relative"] == pytest.approx(np.linalg.norm(high.astype(float) - low) / norm)
    assert cell["difference_relative"] == pytest.approx(apart / norm)
    assert cell["error_relative"] == pytest.approx(errors / norm)
    assert cell["error_ulp"]["largest"] == ulp_distance(results[0], truth).max()


@pytest.mark.parametrize("kind", [GradientKind.NORMAL, GradientKind.HEAVY_TAILED])
def test_the_prediction_holds_on_random_gradients(kind):
    options = SumOptions(workers=(8, 32), types=("float32", "bfloat16"), orders=5)
    sums = measure(synthetic(kind, 32, num_elements=8192), options)
    assert len(sums["cells"]) == 30
    for cell in sums["cells"]:
        assert 0.7 < cell["error_relative"] / cell["predicted_relative"] < 1.4, cell


@pytest.mark.parametrize("kind", GradientKind)
def test_no_error_exceeds_the_bound(kind):
    sums = measure(synthetic(kind, 16, num_elements=2048), SumOptions(workers=(3, 16), orders=6))
    for row in [*sums["cells"], *sums["layers"]]:
        assert row["error_relative"] <= row["bound_relative"], row


def test_what_float16_cannot_hold_is_left_out_and_said():
    values = np.random.default_rng(3).standard_normal((4, 400)).astype(np.float32)
    values[:, :100] = 70_000.0
    values[:, 100:] *= 1e-7
    options = SumOptions(workers=(4,), types=("float16",))
    gradients = LocalGradients("file", "test", {"big": values[:, :100], "tiny": values[:, 100:]})
    sums = measure(gradients, options)
    [cell] = cells_of(sums, sums="float16", algorithm="tree")
    assert cell["share_not_finite"] == 0.25
    assert [note for note in sums["notes"] if "Up to 25 % of the sums overflowed" in note]
    assert [
        note for note in sums["notes"] if "too coarse for the smallest gradients, of tiny" in note
    ]
    assert json.loads(json.dumps(sums, allow_nan=False))["notes"] == list(sums["notes"])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"workers": ()}, "numbers of workers from 2"), ({"types": ("float64",)}, "got float64")],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        SumOptions(**options)
