"""Workers that run on something else than the others."""

import json

import pytest
import torch

from rankscope.bus.finding import Severity
from rankscope.evidence.environment.facts import environment_facts
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


def without(name):
    return [*facts(3), {key: value for key, value in FACTS.items() if key != name}]


def told(of, num_steps=5, **columns):
    return run(EnvironmentMismatch(of), num_steps, **columns)


@pytest.mark.parametrize("of", [(), facts(), [{}, {}, {}, {}], [*facts(3), {}], facts(1)])
def test_equal_or_unknown_environments_are_no_finding(of):
    assert told(of) == []


def test_what_this_machine_runs_on_is_equal_to_itself():
    own = environment_facts(torch.device("cpu"))
    assert told([own, dict(own)]) == []


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        ({"torch": "2.12.0"}, "torch 2.12.0 on rank 3, 2.13.0 on the others"),
        ({"device": "Accelerator 8"}, "device Accelerator 8 on rank 3, Accelerator 9 on the"),
        ({"deterministic_algorithms": True}, "deterministic algorithms on on rank 3, off on"),
        ({"revision": "fedcba9876543210"}, "source revision fedcba9876 on rank 3, 0123456789 on"),
        ({"revision_changed": True}, "source files changed since the commit on rank 3"),
        ({"vocabulary": 999}, "another vocabulary on rank 3"),
        ({"trl": "1.0"}, "trl 1.0 on rank 3, not installed on the others"),
        ({"NVIDIA_TF32_OVERRIDE": "0"}, "NVIDIA_TF32_OVERRIDE 0 on rank 3, not set on the others"),
    ],
)
def test_the_odd_rank_is_told_once_with_what_differs(odd, text):
    evidence = told(facts(**odd))
    assert [(one.cause, one.severity, one.ranks) for one in evidence] == [
        (CAUSE, Severity.WARNING, (3,))
    ]
    assert text in words(evidence[0])
    json.dumps(evidence[0].numbers)


@pytest.mark.parametrize(
    "odd",
    [{"NCCL_ALGO": "Tree"}, {"driver": "570.1"}, {"NCCL_DEBUG": "INFO"}, {"OMP_NUM_THREADS": "2"}],
)
def test_what_should_not_change_results_is_a_note(odd):
    of = [{"driver": "560.1", **own} for own in facts(**odd)]
    assert [one.severity for one in told(of)] == [Severity.NOTE]


@pytest.mark.parametrize(
    "odd",
    [
        {"LOCAL_RANK": "3"},
        {"CUDA_VISIBLE_DEVICES": "3"},
        {"device_memory": 11},
        {"HF_HOME": "/mnt/3"},
        {"TORCHINDUCTOR_CACHE_DIR": "/mnt/3"},
        {"NCCL_SOCKET_IFNAME": "eth3"},
    ],
)
def test_what_every_rank_or_host_has_for_itself_is_not_compared(odd):
    assert told(facts(**odd)) == []


@pytest.mark.parametrize("name", ["revision", "revision_changed", "device", "vocabulary"])
def test_what_one_rank_could_not_tell_is_not_compared(name):
    assert told(without(name)) == []


def test_serious_differences_come_first_and_decide():
    (evidence,) = told(facts(NCCL_ALGO="Tree", torch="2.12.0"))
    assert evidence.severity is Severity.WARNING
    text = words(evidence)
    assert text.index("torch") < text.index("NCCL_ALGO")


def test_several_odd_ranks_are_merged_into_one_finding():
    of = facts(torch="2.12.0")
    of[1]["vocabulary"] = 1
    (evidence,) = told(of)
    assert evidence.ranks == (1, 3)


def test_without_a_majority_all_are_named():
    (evidence,) = told([{"torch": "1"}, {"torch": "1"}, {"torch": "2"}, {"torch": "2"}])
    assert evidence.ranks == (0, 1, 2, 3)
    assert "torch 1 on ranks 0 and 1, 2 on ranks 2 and 3" in words(evidence)


def test_many_differences_are_counted():
    (evidence,) = told(facts(**{f"library_{number}": "1" for number in range(9)}, torch="2"))
    assert "other difference" not in words(evidence)  # of libraries that the others do not tell
    of = [{f"library_{number}": rank == 3 for number in range(9)} for rank in range(4)]
    assert "and 3 other differences" in words(told(of)[0])


def test_another_precision_is_told_after_three_steps_in_a_row():
    detector = EnvironmentMismatch()
    assert run(detector, 2, precision=BF16) == []
    assert observe(detector, 2, precision=[7] * 4) == []
    assert run(detector, 2, start=3, precision=BF16) == []
    (evidence,) = observe(detector, 5, precision=BF16)
    assert (evidence.cause, evidence.severity, evidence.ranks) == (CAUSE, Severity.WARNING, (2,))
    assert (evidence.first_step, evidence.last_step) == (3, 5)
    assert "another precision in the forward pass of rank 2" in words(evidence)


def test_a_precision_that_changes_on_all_workers_together_is_no_finding():
    detector = EnvironmentMismatch()
    for step in range(30):
        assert observe(detector, step, precision=[step] * 4) == []


def test_unknown_precisions_are_not_compared():
    missing = [-(2**63), 7, -(2**63), 7]
    assert run(EnvironmentMismatch(), 9, precision=missing) == []
    assert run(EnvironmentMismatch(), 9) == []


def test_a_precision_that_is_equal_again_closes_the_finding():
    detector = EnvironmentMismatch()
    run(detector, 5, precision=BF16)
    evidence = run(detector, 30, start=5, precision=[7] * 4)
    assert [one.status for one in evidence] == ["closed"]
    assert "of rank 2 until step 4" in words(evidence[0])


def test_precision_and_environment_share_one_finding_that_stays_open():
    detector = EnvironmentMismatch(facts(NCCL_ALGO="Tree"))
    evidence = run(detector, 5, precision=BF16)
    assert [one.severity for one in evidence] == [Severity.NOTE] + [Severity.WARNING] * 3
    assert evidence[-1].ranks == (2, 3)
    assert evidence[-1].first_step == 0
    assert run(detector, 30, start=5, precision=[7] * 4)[-1].status == "open"


def restarted(detector, of):
    copy = EnvironmentMismatch(of)
    copy.restore(detector.state())
    return copy


def test_a_restarted_job_is_compared_anew():
    detector = EnvironmentMismatch(facts(torch="2.12.0"))
    run(detector, 5)
    (still,) = run(restarted(detector, facts(torch="2.12.0")), 5, start=5)
    assert (still.status, still.first_step, still.ranks) == ("open", 0, (3,))
    (healed,) = run(restarted(detector, facts()), 5, start=5)
    assert (healed.status, healed.first_step, healed.ranks) == ("closed", 0, (3,))
    assert words(healed)
