"""Settings and calls of the optimizer that differ between workers, or from the plan."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from rankscope.agent.message import StepMessage
from rankscope.agent.summary import as_columns
from rankscope.bus.finding import Severity
from rankscope.bus.messages import Layout
from rankscope.bus.plan import Plan
from rankscope.bus.step import MISSING_INT, StepReport
from rankscope.evidence.environment.combine import make_combiner
from rankscope.evidence.environment.probe import OptimizerMeter
from rankscope.evidence.environment.settings import (
    CALLS,
    DifferentSettings,
)
from support.stepping import evidence_of, observe, run, words
from support.streams import gathered

NAN = float("nan")
DIFFER = "state.hyperparameters_differ"
ALIKE = {
    "lr": [1e-4] * 4,
    "weight_decay": [0.1] * 4,
    "settings_digest": [7] * 4,
    "optimizer_steps": [1] * 4,
}


def alike(**other):
    return {**ALIKE, **other}


def test_equal_settings_are_no_finding_though_they_change_from_step_to_step():
    detector = DifferentSettings(4)
    for step in range(50):
        same = {"lr": [0.1 / (step + 1)] * 4, "settings_digest": [step] * 4}
        assert observe(detector, step, **alike(**same)) == []


def test_the_odd_learning_rate_is_named_at_once_with_its_value():
    detector = DifferentSettings(4)
    run(detector, 10, **ALIKE)
    (told,) = observe(detector, 10, **alike(lr=[1e-4, 1e-4, 3e-4, 1e-4]))
    assert (told.cause, told.severity, told.ranks) == (DIFFER, Severity.ERROR, (2,))
    assert (told.first_step, told.last_step, told.status) == (10, 10, "open")
    assert "the learning rate is 0.0003 on rank 2, 0.0001 on the others" in words(told)
    json.dumps(told.numbers)


def test_only_what_differs_is_named():
    odd = {"lr": [1e-4, 1e-4, 1e-4, 3e-4], "rates_digest": [1, 1, 1, 2]}
    (told,) = observe(DifferentSettings(4), 0, **alike(**odd))
    assert told.fields["what"] == (
        "the learning rate is 0.0003 on rank 3, 0.0001 on the others; "
        "the learning rates of other parameter groups differ on rank 3"
    )


def test_settings_that_differ_are_named_with_their_values():
    def make(betas, decay=0.0):
        groups = [{"params": [torch.nn.Parameter(torch.ones(2))]} for _ in range(2)]
        groups[1]["weight_decay"] = decay
        return torch.optim.AdamW(groups, betas=betas)

    optimizers = [make((0.9, 0.999)), make((0.9, 0.95), 0.5), make((0.9, 0.999))]
    meters = [OptimizerMeter(one) for one in optimizers]
    combiner = make_combiner(Layout(num_workers=3))
    detector = DifferentSettings(3)
    sent = 0
    for number in range(3):
        messages, digests = [], []
        for meter, optimizer in zip(meters, optimizers, strict=True):
            meter.count(optimizer)
            digests.append(meter.collect()["settings_digest"])
            names = meter.named()
            sent += bool(names)
            packed = np.frombuffer(json.dumps(names).encode() if names else b"", np.uint8)
            messages.append(StepMessage(number, names=packed))
        digests_W = np.array(digests, np.int64)
        none_W = np.full(3, MISSING_INT)
        digested = {"modes": none_W, "settings_digest": digests_W}
        found = combiner.combine(as_columns(messages), digested)
        columns = {"settings_digest": digests_W, "optimizer_steps": np.ones(3, np.int64)}
        samples = [np.array([rank]) for rank in range(3)]
        step = replace(gathered(number, samples, **columns), **found)
        reported = evidence_of(detector, StepReport(step, {}))
    assert sent == 3  # each worker names its settings once
    (last,) = reported
    assert last.ranks == (1,)
    assert last.fields["what"] == (
        "betas is (0.9, 0.95) on rank 1, (0.9, 0.999) on the others; "
        "weight_decay of parameter group 1 is 0.5 on rank 1, 0.0 on the others"
    )


def test_the_smallest_difference_counts_and_shows_in_words():
    odd = float(np.nextafter(1e-4, 1))
    (told,) = observe(DifferentSettings(4), 0, **alike(lr=[odd, 1e-4, 1e-4, 1e-4]))
    assert told.ranks == (0,)
    assert f"{odd!r} on rank 0, 0.0001 on the others" in words(told)


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"weight_decay": [0.1, 0.1, 0.1, 0.0]}, "the weight decay is 0 on rank 3, 0.1 on"),
        (
            {"settings_digest": [7, 7, 7, 8]},
            "or eps, or the weight decay of other parameter groups)",
        ),
        (
            {"rates_digest": [7, 7, 7, 8]},
            ": the learning rates of other parameter groups differ on",
        ),
    ],
)
def test_every_setting_is_compared(columns, text):
    (told,) = observe(DifferentSettings(4), 0, **alike(**columns))
    assert told.ranks == (3,)
    assert text in words(told)


def test_settings_are_compared_among_workers_whose_optimizers_hold_the_same_parameters():
    odd = {"lr": [0.1, 0.1, 0.3, 0.2], "settings_digest": [1, 1, 2, 3]}
    assert observe(DifferentSettings(4), 0, **alike(held_digest=[5, 5, 6, 7], **odd)) == []
    (told,) = observe(DifferentSettings(4), 0, **alike(held_digest=[5, 7, 5, 5], **odd))
    assert told.ranks == (0, 2, 3)


def test_of_two_workers_both_are_named():
    pair = {name: values[:2] for name, values in ALIKE.items()}
    (told,) = observe(DifferentSettings(2), 0, width=2, **{**pair, "lr": [1e-4, 3e-4]})
    assert told.ranks == (0, 1)
    assert "0.0001 on rank 0, 0.0003 on rank 1" in words(told)


def test_without_a_majority_all_are_named():
    (told,) = observe(DifferentSettings(4), 0, **alike(lr=[1.0, 1.0, 2.0, 2.0]))
    assert told.ranks == (0, 1, 2, 3)
    assert "1 on ranks 0 and 1, 2 on ranks 2 and 3" in words(told)


def test_a_step_that_some_skip_accuses_nobody_new():
    detector = DifferentSettings(3)
    odd = {"width": 3, "lr": [1.0, 1.0, 2.0], "settings_digest": [7, 7, 8]}
    run(detector, 3, **odd, optimizer_steps=[1, 1, 1])
    (told,) = observe(detector, 3, **odd, optimizer_steps=[0, 1, 1])
    assert told.ranks == (2,)


def test_what_is_unknown_is_not_compared():
    unknown = alike(
        lr=[NAN, 1e-4, 1e-4, NAN],
        weight_decay=[NAN] * 4,
        settings_digest=[MISSING_INT, 7, 7, 7],
        optimizer_steps=[MISSING_INT] * 4,
    )
    assert run(DifferentSettings(4), 20, **unknown) == []
    assert run(DifferentSettings(4), 20) == []


def test_one_worker_has_nobody_to_differ_from():
    assert run(DifferentSettings(1), 20, width=1, lr=[0.1], optimizer_steps=[1]) == []


def test_a_difference_heals_after_a_while_and_can_come_back():
    detector = DifferentSettings(4)
    odd = alike(lr=[3e-4, 1e-4, 1e-4, 1e-4])
    run(detector, 5, **odd)
    told = run(detector, 30, start=5, **ALIKE)
    assert [(one.status, one.last_step) for one in told] == [("closed", 4)]
    assert "last seen at step 4" in words(told[0])
    (again,) = observe(detector, 40, **odd)
    assert (again.status, again.first_step, again.count) == ("open", 0, 6)


def test_an_old_learning_rate_of_a_worker_that_skips_is_not_compared():
    detector = DifferentSettings(4)
    skipped = alike(lr=[2e-4, 1e-4, 1e-4, 1e-4], optimizer_steps=[0, 1, 1, 1])
    assert observe(detector, 0, **skipped) == []


def test_an_update_that_one_worker_skips_is_told_with_the_next_step():
    detector = DifferentSettings(4)
    run(detector, 10, **ALIKE)
    assert observe(detector, 10, **alike(optimizer_steps=[1, 0, 1, 1])) == []
    (told,) = observe(detector, 11, **ALIKE)
    assert (told.key, told.cause) == (CALLS, "state.parameters_differ")
    assert (told.severity, told.ranks, told.first_step) == (Severity.ERROR, (1,), 10)
    assert told.numbers["other_causes"] == ["state.optimizer_differs"]
    assert "called never on rank 1, once on the others (step 10)" in words(told)


def test_the_last_step_of_a_run_is_not_judged_nor_after_a_restart():
    detector, restarted = DifferentSettings(4), DifferentSettings(4)
    run(detector, 10, **ALIKE)
    assert observe(detector, 10, **alike(optimizer_steps=[1, 0, 0, 1])) == []
    assert list(detector.close()) == []
    restarted.restore(detector.state())
    assert run(restarted, 5, start=11, **ALIKE) == []


def test_updates_that_all_skip_are_healthy():
    detector = DifferentSettings(4)
    for step in range(40):
        calls = [int(step % 3 == 0)] * 4
        assert observe(detector, step, **alike(optimizer_steps=calls)) == []


def test_a_worker_without_data_in_join_is_not_compared():
    idle = alike(
        optimizer_steps=[1, 0, 1, 1], num_samples=[2, 0, 2, 2], lr=[1e-4, 9e-4, 1e-4, 1e-4]
    )
    assert run(DifferentSettings(4), 20, **idle) == []


def test_where_samples_are_unknown_a_skipped_update_still_counts():
    skipped = alike(optimizer_steps=[1, 0, 1, 1], num_samples=[0] * 4)
    assert run(DifferentSettings(4), 3, **skipped)[0].ranks == (1,)


def planned(rates):
    return Plan.of({"learning_rate": rates})


def follow(detector, rates, start=0, calls=1, width=4):
    told = []
    for step, rate in enumerate(rates, start=start):
        columns = {"lr": [rate] * width, "optimizer_steps": [calls] * width}
        told += observe(detector, step, width=width, **columns)
    return told


WARM_UP = [1e-4 * (step + 1) for step in range(10)] + [1e-3] * 40
DECAY = [1e-3 * (1 - step / 100) for step in range(101)]


@pytest.mark.parametrize("rates", [WARM_UP, DECAY, [float(np.float32(r)) for r in WARM_UP]])
def test_a_schedule_that_is_kept_is_no_finding(rates):
    exact = WARM_UP if len(rates) == len(WARM_UP) else DECAY
    assert follow(DifferentSettings(4, planned(exact)), rates) == []


def test_a_last_rate_that_is_only_nearly_zero_is_zero():
    assert follow(DifferentSettings(4, planned([1e-3, 0.0])), [1e-3] + [1e-20] * 9) == []


def test_the_last_planned_rate_holds_on():
    assert follow(DifferentSettings(4, planned([0.1, 0.2])), [0.1] + [0.2] * 20) == []


def test_a_scheduler_that_is_stepped_too_often_is_told_after_three_updates():
    detector = DifferentSettings(4, planned(WARM_UP))
    told = follow(detector, [1e-4, 5e-4, 9e-4, 1e-3, 1e-3])
    assert (told[0].cause, told[0].severity) == ("state.schedule", Severity.WARNING)
    assert (told[0].first_step, told[0].last_step, told[0].ranks) == (1, 3, ())
    assert "at call 3 of optimizer.step (from 0) it was 0.001, and the plan has 0.0004" in words(
        told[0]
    )


def test_two_odd_updates_are_not_told():
    assert follow(DifferentSettings(4, planned(0.1)), [0.1, 0.2, 0.2, 0.1, 0.1]) == []


def test_updates_are_counted_not_steps():
    detector = DifferentSettings(4, planned(WARM_UP))
    told = []
    for step in range(60):  # an update with every third step
        updates = int(step % 3 == 2)
        rate = WARM_UP[max(0, step - 2) // 3]
        columns = {"lr": [rate] * 4, "optimizer_steps": [updates] * 4}
        told += observe(detector, step, **columns)
    assert told == []
    assert follow(DifferentSettings(4, planned(DECAY)), DECAY[1::2], calls=2) == []


def test_updates_whose_learning_rate_is_unknown_are_counted_too():
    rates = [NAN if 10 <= step < 20 else rate for step, rate in enumerate(DECAY)]
    assert follow(DifferentSettings(4, planned(DECAY)), rates) == []


def test_one_worker_off_the_plan_differs_and_the_plan_is_kept():
    detector = DifferentSettings(4, planned(1e-4))
    told = run(detector, 10, **alike(lr=[1e-4, 1e-4, 3e-4, 1e-4]))
    assert {one.cause for one in told} == {DIFFER}


def test_without_a_plan_any_schedule_will_do():
    assert follow(DifferentSettings(4), np.geomspace(1, 1e-9, 50)) == []


def test_one_worker_is_held_against_the_plan_as_well():
    told = follow(DifferentSettings(1, planned(0.1)), [0.2] * 5, width=1)
    assert told[0].cause == "state.schedule"


def restarted(detector, rates):
    copy = DifferentSettings(4, planned(rates))
    copy.restore(detector.state())
    return copy


def test_after_a_restart_updates_are_counted_on():
    detector = DifferentSettings(4, planned(DECAY))
    follow(detector, DECAY[:40])
    assert follow(restarted(detector, DECAY), DECAY[40:], start=40) == []


def test_a_restart_from_an_earlier_checkpoint_goes_on_from_there():
    detector = DifferentSettings(4, planned(DECAY))
    follow(detector, DECAY[:40])
    assert follow(restarted(detector, DECAY), DECAY[25:], start=40) == []


def test_a_restart_whose_scheduler_ran_ahead_is_told():
    detector = DifferentSettings(4, planned(DECAY))
    follow(detector, DECAY[:40])
    told = follow(restarted(detector, DECAY), DECAY[60:], start=40)
    assert told[0].first_step == 40


def test_a_restored_detector_goes_on_as_the_first_would():
    detector, copy = DifferentSettings(4), DifferentSettings(4)
    odd = alike(lr=[3e-4, 1e-4, 1e-4, 1e-4], optimizer_steps=[1, 1, 1, 2])
    run(detector, 5, **odd)
    copy.restore(detector.state())
    assert run(copy, 25, start=5, **ALIKE) == run(detector, 25, start=5, **ALIKE)


def test_changes_between_passes_are_counted_and_those_between_steps_are_not():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    meter = OptimizerMeter(optimizer)
    counts = []
    for moving in (True, False):
        for number in range(3):
            meter.see_pass(first=number == 0)
            optimizer.param_groups[0]["lr"] /= 2 if moving or number == 2 else 1
        counts.append(meter.collect()["lr_changes"])
    assert counts == [2, 0]
