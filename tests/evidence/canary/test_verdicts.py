"""The detector that reads canaries."""

from dataclasses import replace

import numpy as np
import pytest

from rankscope.agent.assembly import summarize
from rankscope.bus.detector import LATENESS, RunFacts
from rankscope.bus.finding import Severity
from rankscope.bus.replicas import StateDifference, StateKind
from rankscope.evidence.canary.judge import CanaryVerdicts
from rankscope.verdict.diagnosis import Diagnosis
from support.stepping import describe, evidence_of
from support.streams import gathered


def step(
    number=32,
    digests=(5, 5, 5, 5),
    again=None,
    losses=None,
    differs=None,
    kinds=(),
    unit=2**-24,
    projected=False,
):
    """Return a step with a canary of rank 2 against rank 3; without one if digests are None."""
    samples = [np.arange(2)] * 4
    columns = {"replica": [0] * 4}
    if digests is not None:
        losses = np.ones(4) if losses is None else np.array(losses)
        columns |= {
            "canary_of": [2] * 4,
            "canary_loss": losses,
            "canary_norm": losses,
            "canary_digest": digests,
            "canary_again": digests if again is None else again,
            "canary_against": [3] * 4,
            "canary_against_loss": losses,
            "canary_against_norm": losses,
            "canary_against_digest": digests,
            "canary_program": [1] * 4,
            "canary_unit": [unit] * 4,
            "canary_projected": [projected] * 4,
        }
    found = gathered(number, samples, **columns)
    if differs is not None:
        own = np.array([9 if rank == differs else 1 for rank in range(4)])
        kinds = kinds or (StateKind.PARAMETER,)
        differences = (
            StateDifference(kind, "head.weight", own, np.zeros(4, bool)) for kind in kinds
        )
        found = replace(found, differences=tuple(differences))
    return summarize(found)


def told(detector, *steps):
    return [evidence for one in steps for evidence in evidence_of(detector, one)]


def test_a_canary_that_agrees_speaks_only_of_a_worker_that_differs():
    assert told(CanaryVerdicts(4), step()) == []
    assert told(CanaryVerdicts(4, lambda: (1,)), step()) == []
    [data] = told(CanaryVerdicts(4, lambda: (2,)), step())
    assert (data.key, data.cause) == ("canary-data", "data.worker_outlier")
    assert (data.severity, data.ranks) == (Severity.NOTE, (2,))
    [data] = told(CanaryVerdicts(4, lambda: (2,)), step(projected=True))
    words = describe(data)[0]
    assert "a projection of the outputs of rank 2's batch was 1 on every worker" in words
    assert "The loss outside of the model is not among what ran. So" in words


def test_state_is_told_where_it_is_known_to_differ():
    bad = {"digests": (5, 6, 5, 5), "losses": (1, 2, 1, 1)}
    [found] = told(CanaryVerdicts(4), step(20, digests=None, differs=1), step(**bad))
    assert (found.cause, found.severity) == ("state.parameters_differ", Severity.ERROR)
    elsewhere = told(CanaryVerdicts(4), step(20, digests=None, differs=3), step(**bad))
    assert elsewhere[0].cause == "compute.worker_outlier"
    healed = step(LATENESS + 21, **bad)
    [later] = told(CanaryVerdicts(4), step(20, digests=None, differs=1), healed)
    assert later.cause == "compute.worker_outlier"


def test_of_halves_state_decides_and_workers_at_random_are_all_named():
    halves = {"digests": (5, 5, 6, 6), "losses": (1, 1, 2, 2)}
    [found] = told(CanaryVerdicts(4), step(**halves, differs=3))
    assert (found.cause, found.ranks) == ("state.parameters_differ", (3,))
    others = {"digests": (5, 6, 7, 8), "losses": (1, 2, 3, 4)}
    [found] = told(CanaryVerdicts(4), step(**others, again=(1, 2, 3, 4)))
    assert (found.cause, found.ranks) == ("compute.nondeterministic", (0, 1, 2, 3))


def test_parameters_that_are_left_out_of_the_reduction_explain_other_results():
    bad = {"digests": (5, 6, 5, 5), "losses": (1, 2, 1, 1), "differs": 1}
    held, left_out = StateKind.HELD, StateKind.LEFT_OUT
    [found] = told(CanaryVerdicts(4), step(**bad, kinds=[held]))
    assert found.cause == "state.parameters_differ"
    assert told(CanaryVerdicts(4), step(**bad, kinds=[held, left_out])) == []
    [found] = told(CanaryVerdicts(4), step(**bad, kinds=[held, left_out, StateKind.PARAMETER]))
    assert found.cause == "state.parameters_differ"


ROUNDED = "no more than rounding may"


@pytest.mark.parametrize(
    ("digests", "loss", "how", "words"),
    [
        ((5, 6, 5, 5), 2, {}, "a different result from the same batch: the loss is 100 % higher"),
        ((5, 6, 5, 5), 1, {}, "loss and norm are the same"),
        ((5, 6, 5, 5), 1 + 1e-5, {}, ROUNDED),
        ((5, 6, 5, 5), 1.006, {"unit": 2**-8}, ROUNDED),
        ((5, 6, 5, 5), 1.02, {"unit": 2**-8, "projected": True}, ROUNDED),
        ((5, 6, 5, 5), 1.02, {"unit": 2**-8}, "2 % higher, and rounding explains at most 0.78 %"),
        ((5, 5, 5, 5), 1, {"again": (5, 5, 5, 7)}, "Rank 3 does not repeat its own result"),
        ((5, 5, 6, 6), 1, {}, "Any of ranks 0–3 may be wrong"),
        ((5, 5, 6, 6), 1, {"differs": 3, "kinds": [StateKind.HOOK]}, "Look at head.weight, or run"),
    ],
)
def test_findings_are_in_plain_words(digests, loss, how, words):
    told = Diagnosis(RunFacts(4)).observe(step(digests=digests, losses=(1, loss, 1, 1), **how))
    [finding] = [f for f in told if f.id.startswith("canary")]
    assert words in f"{finding.explanation} {finding.next_check}"
    assert "before step 32" in finding.explanation.lower()
    assert "{" not in finding.explanation + finding.next_check
