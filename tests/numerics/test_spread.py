"""Measured spread and error against naive loops, theory, and each other."""

import itertools
import json
import math

import numpy as np
import pytest

from numerics.reductions import reduce_mean
from rankscope.errors import UsageError
from rankscope.lab.numerics.gradients import GradientKind, LocalGradients, synthetic
from rankscope.lab.numerics.spread import SumOptions, measure, sentences, size
from rankscope.lab.numerics.summation import Arithmetic, Divide, Scheme, exact_sums
from rankscope.stats.rounding import ulp_distance

SMALL = SumOptions(workers=(8,), orders=12, max_elements=4096)


def local(values, name="a"):
    return LocalGradients("file", "test", {name: np.asarray(values, np.float32)})


def cells_of(measured, **wanted):
    return [cell for cell in measured["cells"] if all(cell[key] == v for key, v in wanted.items())]


@pytest.mark.parametrize("scheme", [Scheme.SEQUENTIAL, Scheme.RING, Scheme.TREE])
def test_all_orders_of_four_workers_are_counted_as_a_loop_counts_them(scheme):
    values = np.random.default_rng(0).standard_normal((4, 50)).astype(np.float32)
    arithmetic = Arithmetic(divide=Divide.AFTER)
    options = SumOptions(workers=(4,), types=("float32",), divide=Divide.AFTER)
    [cell] = cells_of(measure(local(values), options), algorithm=str(scheme))
    results = np.stack(
        [
            reduce_mean(values, scheme, arithmetic, np.array(order))
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


def test_two_workers_have_one_order():
    sums = measure(synthetic(GradientKind.NORMAL, 2), SumOptions(workers=(2,)))
    assert len(sums["cells"]) == 25
    for cell in sums["cells"]:
        assert (cell["num_orders"], cell["distinct_results"], cell["share_differing"]) == (
            2,
            1,
            0.0,
        )
        assert cell["spread_relative"] == cell["difference_relative"] == 0.0


def test_equal_gradients_have_one_sum_and_no_error_in_a_tree():
    values = np.tile(np.random.default_rng(1).standard_normal(500), (8, 1))
    for cell in cells_of(measure(local(values), SMALL), inputs="float32", algorithm="tree"):
        assert cell["distinct_results"] == 1
        assert cell["error_relative"] == 0.0


@pytest.mark.parametrize(
    "kind", [GradientKind.NORMAL, GradientKind.COHERENT, GradientKind.HEAVY_TAILED]
)
@pytest.mark.parametrize("divide", Divide)
def test_the_prediction_holds_on_random_gradients(kind, divide):
    options = SumOptions(workers=(8, 32), types=("float32", "bfloat16"), orders=5, divide=divide)
    sums = measure(synthetic(kind, 32, num_elements=8192), options)
    assert len(sums["cells"]) == 30
    for cell in sums["cells"]:
        assert 0.7 < cell["error_relative"] / cell["predicted_relative"] < 1.4, cell


def test_the_prediction_holds_where_the_division_rounds():
    for divide in Divide:
        options = SumOptions(workers=(6, 12), types=("float32",), divide=divide)
        for cell in measure(synthetic(GradientKind.NORMAL, 12), options)["cells"]:
            assert 0.7 < cell["error_relative"] / cell["predicted_relative"] < 1.4, cell


@pytest.mark.parametrize("kind", GradientKind)
def test_no_error_exceeds_the_bound(kind):
    sums = measure(synthetic(kind, 16, num_elements=2048), SumOptions(workers=(3, 16), orders=6))
    for row in [*sums["cells"], *sums["layers"]]:
        assert row["error_relative"] <= row["bound_relative"], row


def test_errors_grow_with_the_root_of_workers_in_a_ring_and_stay_in_a_tree():
    options = SumOptions(workers=(4, 64), orders=8, types=("float32",))
    sums = measure(synthetic(GradientKind.NORMAL, 64), options)
    growth = {
        scheme: cells_of(sums, workers=64, algorithm=scheme)[0]["error_relative"]
        / cells_of(sums, workers=4, algorithm=scheme)[0]["error_relative"]
        for scheme in ("ring", "tree")
    }
    assert 3.3 < growth["ring"] < 4.5  # sqrt(32.5 / 2.25) = 3.8
    assert 1.4 < growth["tree"] < 2.1  # sqrt(6 / 2) = 1.7


def test_16_bit_sums_lose_more_than_32_bit_sums_of_the_same_inputs():
    sums = measure(synthetic(GradientKind.NORMAL, 32), SumOptions(workers=(32,), orders=4))
    for dtype in ("bfloat16", "float16"):
        [wide] = cells_of(sums, inputs=dtype, sums="float32", algorithm="ring")
        [narrow] = cells_of(sums, inputs=dtype, sums=dtype, algorithm="ring")
        assert wide["result"] == narrow["result"] == dtype
        assert narrow["error_relative"] > 2 * wide["error_relative"]
        assert narrow["share_differing"] > wide["share_differing"]


def test_more_workers_than_gradients_are_made_up_and_said():
    given = synthetic(GradientKind.COHERENT, 8, num_elements=40_000)
    sums = measure(given, SumOptions(workers=(4, 8, 16), orders=2, types=("float32",)))
    assert [world["made_up"] for world in sums["worlds"]] == [0, 0, 8]
    assert [world["cosine"] for world in sums["worlds"]] == pytest.approx([0.9] * 3, abs=0.03)
    [note] = [note for note in sums["notes"] if "made up" in note]
    assert note.startswith("There are gradients of 8 workers; for 16 workers the missing ones")


def test_a_large_buffer_is_sampled_by_layer_and_said():
    rng = np.random.default_rng(2)
    arrays = {
        "large.weight": rng.standard_normal((4, 60_000)).astype(np.float32),
        "small.weight": 1e3 * rng.standard_normal((4, 300)).astype(np.float32),
        "small.bias": 1e3 * rng.standard_normal((4, 20)).astype(np.float32),
    }
    gradients = LocalGradients("file", "test", arrays)
    options = SumOptions(workers=(4,), types=("float32",), max_elements=3000)
    sums = measure(gradients, options)
    assert sums["source"]["num_elements"] == 60_320
    assert 3000 <= sums["source"]["num_measured"] < 3600
    layers = {row["layer"]: row["num_elements"] for row in sums["layers"]}
    assert layers == {"large": 60_000, "small": 320}
    assert sums["notes"][0].endswith(
        "of 60,320 elements were measured, sampled evenly within each layer."
    )
    everything = measure(
        gradients, SumOptions(workers=(4,), types=("float32",), max_elements=10**6)
    )
    assert everything["source"]["num_measured"] == 60_320
    for sampled, whole in zip(sums["cells"], everything["cells"], strict=True):
        assert sampled["error_relative"] == pytest.approx(whole["error_relative"], rel=0.2)
        assert sampled["share_differing"] == pytest.approx(whole["share_differing"], abs=0.03)


def test_what_float16_cannot_hold_is_left_out_and_said():
    values = np.random.default_rng(3).standard_normal((4, 400)).astype(np.float32)
    values[:, :100] = 50_000.0
    values[:, 100:] *= 1e-7
    options = SumOptions(workers=(4,), types=("float16",), divide=Divide.AFTER)
    gradients = LocalGradients("file", "test", {"big": values[:, :100], "tiny": values[:, 100:]})
    sums = measure(gradients, options)
    [cell] = cells_of(sums, sums="float16", algorithm="tree")
    assert cell["share_not_finite"] == 0.25
    assert [note for note in sums["notes"] if "Up to 25 % of the sums overflowed" in note]
    assert [
        note for note in sums["notes"] if "too coarse for the smallest gradients, of tiny" in note
    ]
    assert json.loads(json.dumps(sums, allow_nan=False))["notes"] == list(sums["notes"])


def test_zero_gradients_have_no_error_and_no_undefined_json():
    values = np.zeros((4, 10), np.float32)
    form = measure(local(values), SumOptions(workers=(4,)))
    assert all(cell["error_relative"] == 0.0 for cell in form["cells"])
    assert form["worlds"][0]["cosine"] is None
    json.dumps(form, allow_nan=False)


def test_the_seed_decides_everything():
    options = SumOptions(workers=(16,), orders=4, types=("bfloat16",), seed=3)
    forms = [measure(synthetic(GradientKind.NORMAL, 8, seed=1), options) for _ in range(2)]
    assert forms[0] == forms[1]


def test_the_json_form_has_what_the_text_of_the_module_lists():
    import rankscope.lab.numerics.spread as spread

    form = measure(synthetic(GradientKind.NORMAL, 8), SMALL)
    text = spread.__doc__ or ""
    assert list(form) == [
        *("kind", "source", "options", "notes", "reference", "worlds", "cells", "layers"),
        "sentences",
    ]
    for part in ("source", "options", "reference"):
        assert all(f'"{key}"' in text for key in form[part]), part
    for part in ("worlds", "cells", "layers"):
        assert all(f'"{key}"' in text for key in form[part][0]), part
    assert set(form["cells"][0]["spread_ulp"]) == {"median", "p99", "largest"}


def test_progress_is_told_to_the_end():
    told = []
    measure(synthetic(GradientKind.NORMAL, 8), SMALL, lambda *what: told.append(what))
    assert told[0] == ("sums over 8 workers", 0, 5)
    assert told[-1] == ("sums", 5, 5)


def test_sentences_say_what_was_measured():
    sums = measure(synthetic(GradientKind.NORMAL, 8), SMALL)
    why, whether, what = sums["sentences"]
    [cell] = cells_of(sums, inputs="float32", algorithm="ring")
    assert f"in 12 orders (float32), came back as {cell['distinct_results']} different" in why
    assert f"differ by {size(cell['difference_relative'])} in float32" in whether
    assert "so no step is worse for it" in whether
    assert "rankscope.fixed_order" in what
    assert "with bfloat16 gradients keep partial sums in float32" in what


def test_sentences_where_the_order_changes_nothing():
    form = measure(synthetic(GradientKind.NORMAL, 2), SumOptions(workers=(2,), types=("float32",)))
    why, whether, what = form["sentences"]
    assert "not because of the order" in why
    assert "in all 2 orders" in why
    assert "not at all in float32" in whether
    assert "bfloat16" not in what


def test_sentences_where_rounding_is_as_large_as_the_noise():
    form = measure(
        synthetic(GradientKind.COHERENT, 8), SumOptions(workers=(8,), types=("bfloat16",))
    )
    form["worlds"][0]["noise_relative"] = 1e-3
    assert "not small beside that of the data" in sentences(form)[1]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "?"), (0.0, "0"), (7.4e-8, "7e-08"), (0.0042, "0.4 %"), (0.98, "98 %"), (0.03, "3 %")],
)
def test_sizes_in_words(value, text):
    assert size(value) == text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": ()}, "numbers of workers from 2"),
        ({"workers": (1, 2)}, "numbers of workers from 2"),
        ({"workers": (4096,)}, "numbers of workers from 2"),
        ({"orders": 1}, "from 2 to 1000 orders"),
        ({"types": ("float64",)}, "got float64"),
        ({"types": ()}, "got none"),
        ({"max_elements": 0}, "at least one element"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        SumOptions(**options)


def test_a_layer_that_cancels_has_a_large_error_and_bound():
    sums = measure(
        synthetic(GradientKind.CANCELLING, 16), SumOptions(workers=(16,), types=("float32",))
    )
    for cell in sums["cells"]:
        assert 3e-6 < cell["error_relative"] < cell["bound_relative"]
        assert math.isfinite(cell["predicted_relative"])
