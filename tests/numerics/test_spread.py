"""Measured spread and error against naive loops, theory, and each other."""

import itertools
import json

import numpy as np
import pytest

from numerics.test_summation import exact_sums, reduce_mean
from rankscope.errors import UsageError
from rankscope.lab.numerics.gradients import GradientKind, LocalGradients, synthetic
from rankscope.lab.numerics.spread import SumOptions, measure
from rankscope.lab.numerics.summation import Scheme
from rankscope.stats.rounding import ulp_distance


def local(values, name="a"):
    return LocalGradients("file", "test", {name: np.asarray(values, np.float32)})


def cells_of(measured, **wanted):
    return [cell for cell in measured["cells"] if all(cell[key] == v for key, v in wanted.items())]


@pytest.mark.parametrize("scheme", [Scheme.SEQUENTIAL, Scheme.TREE])
def test_all_orders_of_four_workers_are_counted_as_a_loop_counts_them(scheme):
    values = np.random.default_rng(0).standard_normal((4, 50)).astype(np.float32)
    options = SumOptions(workers=(4,), types=("float32",))
    [cell] = cells_of(measure(local(values), options), algorithm=str(scheme))
    results = np.stack(
        [
            reduce_mean(values, scheme, order=np.array(order))
            for order in itertools.permutations(range(4))
        ]
    )
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
