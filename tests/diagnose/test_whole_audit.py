"""The audit of the whole gradient at once."""

from dataclasses import replace

import pytest

from diagnose.streams import gathered as unobserved
from rankscope.core.step import StepReport
from rankscope.diagnose.audit import ReductionAudit
from rankscope.diagnose.audit_levels import STEPS
from rankscope.diagnose.evidence import Observation
from rankscope.diagnose.rules import describe

CAUSE = "numerics.reduction_error"
FINE = [5e-7] * STEPS


def audit(values, **kinds):
    """Return all evidence about steps with these residuals, one after the other."""
    detector, told = ReductionAudit(4, **kinds), []
    for step, value in enumerate(values):
        one = replace(unobserved(step, [[]] * 4), observed=True)
        told += detector.observe(Observation(StepReport(one, {"reduction_residual": value})))
    told += detector.close()
    for evidence in told:
        describe(evidence.key, evidence.severity, evidence.fields)
        assert evidence.cause == CAUSE
    return told


def whole(values, **kinds):
    return [(e.key, str(e.severity), e.first_step) for e in audit(values, **kinds)]


def test_without_groups_the_whole_gradient_is_audited():
    assert whole([5e-7] * 100) == []
    assert whole([3.7e-3] * STEPS) == [(CAUSE, "warning", 0)]
    assert whole([0.3] * STEPS) == [("reduction-lossy", "warning", 0)]
    assert whole([*FINE, 2e-3, *FINE]) == [("reduction-spike", "error", STEPS)]


@pytest.mark.parametrize(("dtype", "usual"), [("bfloat16", 3.9e-3), ("float16", 4e-4)])
def test_rounding_in_the_type_that_is_meant_is_no_error(dtype, usual):
    meant = {"all": dtype}
    assert whole([usual] * 100, reduced_in=meant) == []
    assert whole([0.3] * STEPS, reduced_in=meant) == [("reduction-lossy", "warning", 0)]


def test_only_coarser_types_than_meant_explain_an_error():
    values = [3.7e-3] * STEPS
    (evidence,) = audit(values, reduced_in={"all": "float16"})
    assert (evidence.key, evidence.fields["fits"]) == (CAUSE, "bfloat16")
    assert evidence.fields["meant"] == "float16"
    assert audit(values, reduced_in={"a": "float16", "b": "bfloat16"}) == []
    assert audit(values, reduced_in={"all": "float8_e5m2"}) == []


def test_where_gradients_were_zero_rounding_is_no_spike():
    assert whole([0.0] * STEPS + [3e-3] * 3, reduced_in={"all": "bfloat16"}) == []


def test_compression_that_begins_late():
    late = FINE + [0.3] * 40
    assert [key for key, *_ in whole(late)] == ["reduction-spike"] + ["reduction-lossy"] * 25
    assert {key for key, *_ in whole(late, hook=True)} == {"reduction-lossy"}


@pytest.mark.parametrize("steps", [1, 3])
def test_under_a_hook_the_next_steps_decide(steps):
    (evidence,) = audit(FINE + [2e-3] * steps + FINE, hook=True)
    assert evidence.key == "reduction-spike"
    assert (evidence.first_step, evidence.last_step) == (STEPS, STEPS + steps - 1)
    assert evidence.count == steps


def test_a_last_step_under_a_hook_is_told_in_the_end():
    assert whole([*FINE, 2e-3], hook=True) == [("reduction-spike", "error", STEPS)]


def test_each_further_step_counts_once():
    *_, last = audit(FINE + [2e-3] * 3 + FINE)
    assert (last.first_step, last.last_step, last.count) == (STEPS, STEPS + 2, 3)


def test_its_state_goes_on_in_the_middle_of_high_steps():
    before, after = ReductionAudit(4, hook=True), ReductionAudit(4, hook=True)
    told = []
    for step, value in enumerate([*FINE, 2e-3, 5e-7]):
        detector = before if step <= STEPS else after
        one = replace(unobserved(step, [[]] * 4), observed=True)
        told += detector.observe(Observation(StepReport(one, {"reduction_residual": value})))
        if detector is before:
            after.restore(before.state())
    assert [(evidence.key, evidence.first_step) for evidence in told] == [
        ("reduction-spike", STEPS)
    ]
