from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rankscope.bus.probe import DirectedRun
from rankscope.evidence.reference.director import Verifications
from rankscope.evidence.reference.verify import GradientMismatch, ReferenceAnswer, verify
from rankscope.evidence.reference.words import verified
from rankscope.stats.rounding import round_to_bfloat16
from support.reference_share import share_of

W, M, P, K = 3, 4, 5, 31
NAMES = tuple(f"layers.{number}.weight" for number in range(P))
TOKENS = [np.array([9.0, 5.0, 7.0, 3.0]) + rank for rank in range(W)]
EQUAL = np.full((W, M), 1 / (W * M))
BY_TOKEN = np.array(TOKENS) / np.sum(TOKENS)


def gradients(seed=0):
    """Return the gradient of each micro-batch's mean loss: alike, as in a training ``[W,M,P,K]``"""
    random = np.random.default_rng(seed)
    return random.standard_normal((P, K)) + random.standard_normal((W, M, P, K))


def summed(units, weights):
    return np.einsum("wm,wmpk->pk", weights, units).astype(np.float32)


def parts(units, scales, given, reduced=None, dtype="float32", replicas=None, *, clips=False):
    """Return what the workers send; ``given`` is of all of them, or of each ``[W,P,K]``."""
    terms = (units * scales[..., None, None]).astype(np.float32)
    given = np.broadcast_to(given, (W, P, K)).astype(np.float32)
    none = np.empty((0, K), np.float32)
    told = {
        "types": (dtype,) * P,
        "reduced_PK": none if reduced is None else reduced.astype(np.float32),
        "replicas_PK": none if replicas is None else replicas.astype(np.float32),
        "axis": "" if replicas is None else "tp",
    }
    return [
        share_of(NAMES, terms[rank], given[rank], copies=W, clips=clips, **told)
        for rank in range(W)
    ]


def ask(given, *, scales=None, meant=None, tokens=TOKENS, known=True, units=None, **more):
    units = gradients() if units is None else units
    scales = np.full((W, M), 1 / M) if scales is None else scales
    told = list(scales) if known else [np.full(M, np.nan)] * W
    return verify(parts(units, scales, given, **more), told, tokens, meant)


def words(found):
    return verified(found, 20, W, M).explanation


@pytest.mark.parametrize(
    ("weights", "weighting"),
    [
        (EQUAL, "worker"),
        (BY_TOKEN, "token"),
        (np.array([own / own.sum() / W for own in TOKENS]), "tokens_of_worker"),
    ],
)
def test_each_way_to_weight_micro_batches_agrees_and_is_named(weights, weighting):
    found = ask(summed(gradients(), weights), scales=W * weights)
    assert (found.answer, found.weighting) == (ReferenceAnswer.AGREES, weighting)
    assert found.ulps < 3
    assert "is what one process would compute (within" in words(found)


def test_a_plan_makes_one_weighting_the_only_right_one():
    given = summed(gradients(), EQUAL)
    assert ask(given, meant="worker").answer is ReferenceAnswer.AGREES
    found = ask(given, meant="token")
    assert found.answer is ReferenceAnswer.WEIGHTING
    assert found.in_loss
    np.testing.assert_allclose(found.ratios, EQUAL / BY_TOKEN, rtol=1e-4)


@pytest.mark.parametrize("factor", [float(W), -1.0])
def test_a_factor_of_all_parameters_is_told(factor):
    found = ask(factor * summed(gradients(), EQUAL))
    assert found.answer is ReferenceAnswer.SCALE
    assert found.factor == pytest.approx(factor, rel=1e-5)
    assert not found.in_loss
    assert "it became so in the reduction, or after it" in words(found)


def test_a_factor_of_the_loss_is_told_from_one_that_came_later():
    found = ask(summed(gradients(), EQUAL / W), scales=np.full((W, M), 1 / (M * W)))
    assert (found.answer, found.in_loss) == (ReferenceAnswer.SCALE, True)
    said = "0.333 times what one process would compute, as if averaged over the workers twice"
    assert said in words(found)
    assert "it was so when backward was called" in words(found)


def test_clipping_and_unscaling_after_a_sound_reduction_agree():
    sound = summed(gradients(), EQUAL)
    found = ask(0.25 * sound, reduced=sound)
    assert (found.answer, found.clipped) == (ReferenceAnswer.AGREES, pytest.approx(0.25))
    scaled = ask(0.25 * sound, scales=np.full((W, M), 65536 / M), reduced=65536 * sound)
    assert (scaled.answer, scaled.clipped) == (ReferenceAnswer.AGREES, pytest.approx(0.25))
    assert ask(0.25 * sound, reduced=0.25 * sound).answer is ReferenceAnswer.SCALE
    assert ask(4 * sound, reduced=sound).answer is ReferenceAnswer.SCALE


def test_a_factor_of_the_loss_that_clipping_hides_is_told():
    sound = summed(gradients(), EQUAL)
    scales = np.full((W, M), float(W))
    found = ask(0.25 * sound, scales=scales, reduced=W * M * sound, clips=True)
    assert (found.answer, found.in_loss) == (ReferenceAnswer.SCALE, True)
    assert found.factor == pytest.approx(W * M, rel=1e-5)


def test_a_factor_that_may_be_meant_is_one_of_the_mean_loss():
    found = ask(0.965 * summed(gradients(), BY_TOKEN), scales=0.965 * W * BY_TOKEN)
    finding = verified(found, 20, W, M)
    assert str(finding.severity) == "warning"
    said = "0.965 times that of the mean loss, where each label token counts alike; it was so"
    assert said in finding.explanation


def test_stages_of_a_pipeline_may_sum_a_shared_weight_after_a_sound_reduction():
    sound = summed(gradients(), EQUAL)
    given = sound.copy()
    given[1] += sound[0]
    told = [np.full(M, 1 / M)] * W
    units = parts(gradients(), np.full((W, M), 1 / M), given, reduced=sound)
    found = verify(units, told, TOKENS, in_pipeline=True)
    assert (found.answer, len(found.summed)) == (ReferenceAnswer.AGREES, 1)
    assert "as stages do that share a weight" in words(found)
    assert verify(units, told, TOKENS).answer is ReferenceAnswer.PARAMETERS


@pytest.mark.parametrize(
    ("weights", "missing"),
    [
        ([[0, 0, 0, 1]] * W, "lacks micro-batches 1 to 3 of every worker."),
        ([[0, 0, 0, 4]] * W, "of every worker; the others count 4 times what is meant."),
        ([[1] * 4, [1, 0, 1, 1], [1] * 4], "lacks micro-batch 2 of rank 1."),
        ([[1] * 4, [0] * 4, [1] * 4], "lacks all micro-batches of rank 1."),
    ],
)
def test_missing_micro_batches_are_named(weights, missing):
    found = ask(summed(gradients(), EQUAL * weights))
    assert found.answer is ReferenceAnswer.MICRO_BATCHES
    assert missing in words(found)


def test_a_worker_of_another_weight_is_named():
    weights = EQUAL * [[1.0], [1.9], [1.0]]
    found = ask(summed(gradients(), weights))
    finding = verified(found, 20, W, M)
    assert (found.answer, finding.ranks) == (ReferenceAnswer.WEIGHTING, (1,))
    assert "rank 1 1.9 times what is meant" in finding.explanation
    np.testing.assert_allclose(finding.evidence["ratios"], weights / EQUAL, rtol=1e-4)


@pytest.mark.parametrize(
    ("of_worker", "severity", "told"),
    [
        ([0.960, 0.965, 0.970], "warning", "of every worker 0.96 to 0.97 times what is meant"),
        ([3.0, 3.01, 2.99], "error", "of every worker 2.99 to 3.01 times what is meant"),
        ([1.0, 1.9, 1.0], "error", "of rank 1 1.9 times what is meant"),
    ],
)
def test_weights_of_the_loss_that_clipping_hides_are_told(of_worker, severity, told):
    weights = EQUAL * np.array(of_worker)[:, None]
    reduced = summed(gradients(), weights)
    found = ask(0.25 * reduced, scales=W * weights, reduced=reduced, clips=True)
    finding = verified(found, 20, W, M)
    assert (found.answer, str(finding.severity)) == (ReferenceAnswer.WEIGHTING, severity)
    assert told in finding.explanation
    assert "it was so when backward was called" in finding.explanation


@pytest.mark.parametrize(
    ("of_worker", "planned", "severity"),
    [
        ([0.5, 1.1, 1.4], False, "note"),  # a mixture of domains
        ([0.5, 1.1, 1.4], True, "error"),
        ([0.5, 1.1, 1.9], False, "error"),
        ([1.0, 0.5, 1.5], False, "error"),
    ],
)
def test_weights_of_all_workers_whose_mean_is_one_are_a_mixture(of_worker, planned, severity):
    weights = EQUAL * np.array(of_worker)[:, None]
    found = ask(summed(gradients(), weights), scales=W * weights)
    finding = verified(found, 20, W, M, planned=planned)
    assert found.answer is ReferenceAnswer.WEIGHTING
    assert str(finding.severity) == severity


def test_a_missing_micro_batch_among_others_of_unequal_weights_is_one_of_the_weights():
    weights = EQUAL * [[1, 1, 1, 0], [1] * M, [1.9] * M]
    found = ask(summed(gradients(), weights))
    assert found.answer is ReferenceAnswer.WEIGHTING
    np.testing.assert_allclose(found.ratios, weights / EQUAL, atol=1e-4)


@pytest.mark.parametrize(
    ("weights", "severity"),
    [
        (EQUAL * [[1.0], [1.9], [1.0]], "error"),
        (EQUAL * (1 + np.arange(W * M).reshape(W, M)), "warning"),  # such as a weight per class
    ],
)
def test_weights_of_the_loss_that_may_be_meant_are_a_warning(weights, severity):
    given = summed(gradients(), weights)
    in_loss = ask(given, scales=W * weights)
    assert in_loss.in_loss
    assert str(verified(in_loss, 20, W, M).severity) == severity
    assert str(verified(ask(given), 20, W, M).severity) == "error"


def own_gradients(units):
    return np.stack([W * summed(units[[rank]], EQUAL[[rank]]) for rank in range(W)])


@pytest.mark.parametrize("how", GradientMismatch)
def test_a_parameter_that_differs_alone_is_named(how):
    units = gradients()
    sound = summed(units, EQUAL)
    given = np.broadcast_to(sound, (W, P, K)).copy()
    given[:, 2] = {
        GradientMismatch.NOT_REDUCED: own_gradients(units)[:, 2],
        GradientMismatch.MISSING: 0.0,
        GradientMismatch.SCALE: 0.5 * sound[2],
        GradientMismatch.CHANGED: np.where(np.arange(K) == 3, 2.0, 1.0) * sound[2],
        GradientMismatch.PARTIAL: np.where(np.arange(K) % 3 == 0, 0.3, 0.6) * sound[2],
    }[how]
    replicas = given[0].copy()
    replicas[2] = sound[2] if how is GradientMismatch.PARTIAL else given[0, 2] * 2  # over two ranks
    found = ask(given, reduced=sound, replicas=replicas)
    if how is GradientMismatch.MISSING:  # it was there when reduced: held back
        assert (found.answer, found.held) == (ReferenceAnswer.AGREES, (NAMES[2],))
        found = ask(given)
        assert found.odd[0].how is how
        return
    assert found.answer is ReferenceAnswer.PARAMETERS
    (odd,) = found.odd
    assert (odd.name, odd.how) == (NAMES[2], how)
    assert odd.afterwards
    assert not ask(given).odd[0].afterwards  # what the reduction has left is not known
    assert "in layers.2.weight alone: " in words(found)


def test_a_gradient_where_one_process_has_none_is_called_so():
    units = gradients()
    units[..., 2, :] = 0
    given = summed(units, EQUAL)
    given[2] = 1
    found = ask(given, units=units)
    assert f"in {NAMES[2]} alone: one process would have none." in words(found)


def test_unknown_losses_leave_the_weights_of_backward_passes():
    scales = np.array([[0.7] * M, [0.1] * M, [2.0] * M])
    found = ask(summed(gradients(), scales / W), scales=scales, known=False)
    assert (found.answer, found.weighting) == (ReferenceAnswer.AGREES, "backward")
    lost = ask(summed(gradients(), scales / W * [0, 1, 1, 1]), scales=scales, known=False)
    assert lost.answer is ReferenceAnswer.MICRO_BATCHES
    whole = ask(summed(gradients(), scales), scales=scales, known=False)
    assert whole.answer is ReferenceAnswer.SCALE
    finding = verified(whole, 20, W, M)
    assert str(finding.severity) == "warning"  # the loss may be divided by W
    assert "the loss is not known" in finding.explanation


def test_rounding_to_bfloat16_agrees_in_a_bfloat16_parameter_alone():
    units = round_to_bfloat16(gradients()).astype(np.float64)
    given = round_to_bfloat16(summed(units, EQUAL)).reshape(P, K)
    scales = np.ones((W, M))
    whole = ask(M * given, units=units, scales=scales, known=False, dtype="bfloat16")
    assert whole.answer is ReferenceAnswer.AGREES
    assert whole.ulps < 3
    plain = ask(M * given, units=units, scales=scales, known=False)
    assert plain.answer is not ReferenceAnswer.AGREES


def taken_back(factors, error=0.0):
    """Return what is found where factors of each parameter's own come after the reduction."""
    reduced = summed(gradients(), EQUAL) + np.float32(error)
    found = ask(reduced * np.array(factors)[:, None], reduced=reduced)
    return found, verified(found, 20, W, M)


def test_a_layer_that_is_held_back_and_clipping_by_layer_are_right():
    found, finding = taken_back([0.0, 0.9, 0.5, 0.1, 1.0])
    assert (found.answer, str(finding.severity)) == (ReferenceAnswer.AGREES, "note")
    assert "times 0.1 to 0.9 of each parameter's own" in finding.explanation
    assert "without layers.0.weight, held back after it" in finding.explanation


@pytest.mark.parametrize(
    ("factors", "error"),
    [
        ([0.5, 0.5, 1.0, 1.0, 1.0], 0.0),  # one factor of some
        ([2.0, 0.9, 0.5, 0.1, 1.0], 0.0),  # one of them grows
        ([-0.5, 0.9, 0.5, 0.1, 1.0], 0.0),
        ([0.0, 0.9, 0.5, 0.1, 1.0], 0.5),  # the reduction is wrong, whatever comes after it
    ],
)
def test_other_changes_after_the_reduction_are_errors(factors, error):
    _, finding = taken_back(factors, error)
    assert str(finding.severity) == "error"


def judged(*, factor=1.0, losses=None, digests=({}, {}, {})):
    """Return the finding of W workers, whose backward passes had a factor on their losses."""
    draw = np.random.default_rng(0)
    terms = draw.standard_normal((W, 1, 2, 31)).astype(np.float32) * factor
    given = terms.mean(axis=0)[0]
    values = draw.uniform(2, 3, W)
    found = []
    root = Verifications(DirectedRun(W, 0, Path(), report=found.append))
    for rank in range(W):
        root_of = (values[rank] * factor,)
        more = {"digests": digests[rank], "roots_M": root_of, "copies": W}
        root.take(
            rank, 5, share_of(("up.weight", "down.weight"), terms[rank], given, **more).pack()
        )
    unknown = tuple(np.array([np.nan]) for _ in range(W))
    micro = dict.fromkeys(("micro_scales", "micro_weights", "micro_losses"), unknown)
    if losses is not None:
        micro["micro_losses"] = tuple(np.array([value]) for value in losses(values))
    step = SimpleNamespace(step=5, workers={"loss_divided": np.zeros(W)}, **micro)
    root.observe(step, (), (), 5)
    (finding,) = found
    return finding


def test_a_loss_that_is_not_known_may_have_any_factor():
    finding = judged()
    assert finding.cause == "verify.declined"
    assert "the factor between the loss" in finding.explanation


@pytest.mark.parametrize(("factor", "cause"), [(1.0, "verify.agrees"), (1 / W, "verify.scale")])
def test_a_loss_given_after_its_backward_pass_has_the_factor_of_its_value(factor, cause):
    finding = judged(factor=factor, losses=lambda values: values)
    assert finding.cause == cause
    assert ("averaged over the workers twice" in finding.explanation) == (factor != 1)


def test_workers_that_hold_other_parameters_have_no_common_gradient():
    digests = ({"up.weight": 1, "down.weight": 2}, {"up.weight": 1, "down.weight": 2})
    finding = judged(digests=(*digests, {"up.weight": 1, "down.weight": 3}))
    assert finding.cause == "verify.declined"
    assert "different values of down.weight" in finding.explanation
