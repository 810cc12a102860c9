"""Who holds up whom, from places, states and stacks made by hand."""

import pytest

from rankscope.agent.hang_report import (
    CodePlace,
    Fate,
    HangReport,
    ProcessState,
    Stack,
    judge_hang,
    judge_stacks,
)

FORWARD, BACKWARD, AFTER = (1, "forward"), (2, "backward"), (3, "step")


def judge(*places, states=None, left=(), num_workers=None):
    """Judge ranks whose processes run unless told, at ``(step, (passes, phase))`` each."""
    by_rank = {
        rank: CodePlace(step, *within)
        for rank, (step, *rest) in enumerate(places)
        for within in rest
    }
    running = dict.fromkeys(by_rank, ProcessState.RUNNING)
    return judge_hang(125.0, num_workers or len(places), by_rank, running | (states or {}), left)


def fates(report):
    return {one.rank: one.fate for one in report.suspects}


def stack(*frames):
    return Stack(thread="MainThread", frames=list(frames), missing="")


IN_BACKWARD = stack("_engine_run_backward (torch/autograd/graph.py:841)", "backward (_tensor.py:1)")
IN_BARRIER = stack("barrier (torch/distributed/distributed_c10d.py:4000)", "save (job.py:1)")
IN_WRAPPER = stack("DistributedDataParallel._pre_forward (torch/nn/parallel/distributed.py:1775)")
IN_GATHERING = stack(
    "all_gather_into_tensor (torch/distributed/distributed_c10d.py:4000)",
    "foreach_all_gather (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:200)",
)
IN_LAYER = stack("Block.forward (model.py:10)", *IN_WRAPPER["frames"])
IN_LOCK = stack("take (job.py:10)", "train (job.py:20)")


def test_a_rank_in_the_forward_pass_holds_up_those_in_the_backward_pass():
    report = judge((7, BACKWARD), (7, FORWARD), (7, BACKWARD))
    assert fates(report) == {1: Fate.STUCK}
    assert (report.step, report.waiting, report.phase) == (7, (0, 2), "backward")
    assert str(report) == (
        "step 7 has not ended for 125 s; rank 1 is alive and behind, in the forward pass of step 7"
    )


@pytest.mark.parametrize(
    ("state", "fate"),
    [(ProcessState.ENDED, Fate.ENDED), (ProcessState.STOPPED, Fate.STOPPED)],
)
def test_an_ended_or_stopped_rank_accounts_for_the_hang_wherever_it_was(state, fate):
    # Rank 0 is behind too, but only since it waits for rank 1.
    report = judge((7, FORWARD), (7, BACKWARD), (7, BACKWARD), states={1: state})
    assert fates(report) == {1: fate}
    assert report.waiting == (0, 2)


def test_a_rank_that_left_early_is_named_and_one_that_left_in_time_is_not():
    report = judge((7, FORWARD), (5, AFTER), (7, FORWARD), left=(1, 2))
    assert fates(report) == {1: Fate.LEFT}
    assert (report.step, report.waiting) == (7, (0,))
    assert "rank 1 is not watched any more, after the backward pass of step 5" in str(report)


def test_a_rank_that_never_spoke_is_missing_in_the_first_step_only():
    report = judge((0, BACKWARD), (0, BACKWARD), num_workers=4)
    assert fates(report) == {2: Fate.MISSING, 3: Fate.MISSING}
    assert str(report).endswith("rank 2 never said anything; rank 3 never said anything")
    assert judge((1, FORWARD), (1, FORWARD), num_workers=4).is_pause


# Stacks, where places tell nothing -----------------------------------------------------------

LEVEL = HangReport(7, 125.0, waiting=(0, 1, 2))


@pytest.mark.parametrize("waits", [IN_WRAPPER, IN_GATHERING])
def test_ranks_that_wait_in_the_wrapper_as_a_step_begins_are_held_up(waits):
    report = judge_stacks(LEVEL, {0: waits, 1: IN_LAYER, 2: waits})
    assert (report.ranks, report.phase) == ((1,), "forward")


def test_ranks_that_wait_for_one_that_saves_pause():
    assert judge_stacks(LEVEL, {0: IN_LOCK, 1: IN_BARRIER, 2: IN_BARRIER}) == LEVEL
    assert judge_stacks(LEVEL, dict.fromkeys(range(3), IN_LOCK)) == LEVEL
    assert judge_stacks(LEVEL, dict.fromkeys(range(3), IN_LAYER)) == LEVEL


def test_ranks_that_all_compile_do_not_hang():
    compiling = stack(
        "wait (subprocess.py:1)", "load (torch/_inductor/codecache.py:3000)", *IN_BACKWARD["frames"]
    )
    running = stack("call (torch/_inductor/output_code.py:600)", *IN_BACKWARD["frames"])
    level = judge(*[(7, BACKWARD)] * 3)
    assert not level.is_pause
    assert judge_stacks(level, dict.fromkeys(range(3), compiling)).is_pause
    assert judge_stacks(level, {0: compiling, 1: running, 2: compiling}) == level


def test_the_rank_that_went_on_without_a_collective_is_named():
    behind = judge((7, FORWARD), (7, FORWARD), (7, BACKWARD), (7, FORWARD))
    assert behind.ranks == (0, 1, 3)
    report = judge_stacks(behind, dict.fromkeys((0, 1, 3), IN_GATHERING) | {2: IN_BACKWARD})
    assert fates(report) == {2: Fate.AHEAD}
    assert (report.waiting, report.phase) == ((0, 1, 3), "")
    assert "rank 2 is alive and ahead, without the collective" in str(report)
    assert judge_stacks(report, {2: IN_BACKWARD}) == report


@pytest.mark.parametrize(
    "stacks",
    [
        {0: IN_GATHERING, 1: IN_BARRIER, 3: IN_GATHERING},
        {0: IN_LOCK, 1: IN_LOCK, 3: IN_LOCK},
        {0: IN_GATHERING, 1: IN_GATHERING},
    ],
    ids=["two collectives", "no collective", "one stack is unknown"],
)
def test_who_is_ahead_is_not_accused_otherwise(stacks):
    behind = judge((7, FORWARD), (7, FORWARD), (7, BACKWARD), (7, FORWARD))
    assert judge_stacks(behind, stacks | {2: IN_BACKWARD}) == behind
