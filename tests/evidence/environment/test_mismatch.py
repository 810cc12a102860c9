"""Workers that run on something else than the others."""

import json

import pytest

from rankscope.bus.finding import Severity
from rankscope.evidence.environment.judge import CAUSE, EnvironmentMismatch
from support.stepping import observe, run, words

FACTS = {
    "torch": "2.13.0",
    "device": "Accelerator 9",
    "deterministic_algorithms": False,
    "revision": "0123456789abcdef",
    "revision_changed": False,
    "vocabulary": 12345,
    "NCCL_ALGO": "Ring",
    "LOCAL_RANK": "0",
    "device_memory": 10,
}
BF16 = [7, 7, 8, 7]


def facts(width=4, **odd):
    """Return what the ranks run on; rank 3 has these other facts."""
    return [dict(FACTS) for _ in range(width - 1)] + [{**FACTS, **odd}]


def told(of, num_steps=5, **columns):
    return run(EnvironmentMismatch(of), num_steps, **columns)


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        ({"torch": "2.12.0"}, "torch 2.12.0 on rank 3, 2.13.0 on the others"),
        ({"deterministic_algorithms": True}, "deterministic algorithms on on rank 3, off on"),
        ({"revision": "fedcba9876543210"}, "source revision fedcba9876 on rank 3, 0123456789 on"),
        ({"vocabulary": 999}, "another vocabulary on rank 3"),
        ({"NVIDIA_TF32_OVERRIDE": "0"}, "NVIDIA_TF32_OVERRIDE 0 on rank 3, not set on the others"),
    ],
)
def test_the_odd_rank_is_told_once_with_what_differs(odd, text):
    [found] = told(facts(**odd))
    assert (found.cause, found.severity, found.ranks) == (CAUSE, Severity.WARNING, (3,))
    assert text in words(found)
    json.dumps(found.numbers)


@pytest.mark.parametrize("odd", [{"NCCL_ALGO": "Tree"}, {"driver": "570.1"}])
def test_what_should_not_change_results_is_a_note(odd):
    of = [{"driver": "560.1", **own} for own in facts(**odd)]
    assert [one.severity for one in told(of)] == [Severity.NOTE]


@pytest.mark.parametrize(
    "of",
    [
        *((), facts(), [*facts(3), {}]),  # equal, or unknown
        facts(LOCAL_RANK="3"),
        facts(device_memory=11),
        facts(TORCHINDUCTOR_CACHE_DIR="/mnt/3"),
        facts(NCCL_SOCKET_IFNAME="eth3"),
    ],
)
def test_what_is_equal_or_what_every_rank_has_for_itself_is_no_finding(of):
    assert told(of) == []


def test_another_precision_is_told_after_three_steps_in_a_row():
    detector = EnvironmentMismatch()
    assert run(detector, 2, precision=BF16) == []
    assert observe(detector, 2, precision=[7] * 4) == []
    assert run(detector, 2, start=3, precision=BF16) == []
    (evidence,) = observe(detector, 5, precision=BF16)
    assert (evidence.cause, evidence.severity, evidence.ranks) == (CAUSE, Severity.WARNING, (2,))
    assert (evidence.first_step, evidence.last_step) == (3, 5)
    assert "in the forward pass of rank 2, types, autocast or torch.backends differ" in words(
        evidence
    )


def test_a_precision_that_changes_on_all_workers_together_is_no_finding():
    detector = EnvironmentMismatch()
    for step in range(30):
        assert observe(detector, step, precision=[step] * 4) == []
