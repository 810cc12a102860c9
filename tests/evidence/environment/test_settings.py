import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rankscope.agent.host_summary import as_columns
from rankscope.bus.finding import Severity
from rankscope.bus.messages import Layout
from rankscope.bus.plan import Plan
from rankscope.bus.step import StepReport
from rankscope.evidence.environment import settings
from rankscope.evidence.environment.judge import make_combiner
from rankscope.evidence.environment.probe import OptimizerMeter
from rankscope.stats.arrays import MISSING_INT
from support.stepping import evidence_of, named_message, observe, run, words
from support.streams import gathered

ALIKE = {
    "lr": [1e-4] * 4,
    "weight_decay": [0.1] * 4,
    "settings_digest": [7] * 4,
    "optimizer_steps": [1] * 4,
}


def alike(**other):
    return {**ALIKE, **other}


@pytest.mark.parametrize("odd", [3e-4, float(np.nextafter(1e-4, 1))])
def test_the_odd_learning_rate_is_named_at_once_with_its_value(odd):
    detector = settings.DifferentSettings(4)
    run(detector, 10, **ALIKE)
    (told,) = observe(detector, 10, **alike(lr=[1e-4, 1e-4, odd, 1e-4]))
    assert told.cause == "state.hyperparameters_differ"
    assert (told.severity, told.ranks) == (Severity.ERROR, (2,))
    assert (told.first_step, told.last_step, told.status) == (10, 10, "open")
    assert f"the learning rate is {odd!r} on rank 2, 0.0001 on the others" in words(told)
    json.dumps(told.numbers)


def test_settings_that_differ_are_named_with_their_values():
    def make(betas, decay=0.0):
        groups = [{"params": [torch.nn.Parameter(torch.ones(2))]} for _ in range(2)]
        groups[1]["weight_decay"] = decay
        return torch.optim.AdamW(groups, betas=betas)

    optimizers = [make((0.9, 0.999)), make((0.9, 0.95), 0.5), make((0.9, 0.999))]
    meters = [OptimizerMeter(one) for one in optimizers]
    combiner = make_combiner(Layout(num_workers=3))
    detector = settings.DifferentSettings(3)
    sent = 0
    for number in range(3):
        messages, digests = [], []
        for meter, optimizer in zip(meters, optimizers, strict=True):
            meter.after_update(optimizer, complete=True)
            digests.append(meter.take()["settings_digest"])
            names = meter.named()
            sent += bool(names)
            messages.append(named_message(number, names))
        digests_W = np.array(digests, np.int64)
        digested = {"modes": np.full(3, MISSING_INT), "settings_digest": digests_W}
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


def test_an_update_that_one_worker_skips_is_told_with_the_next_step():
    detector = settings.DifferentSettings(4)
    run(detector, 10, **ALIKE)
    assert observe(detector, 10, **alike(optimizer_steps=[1, 0, 1, 1])) == []
    (told,) = observe(detector, 11, **ALIKE)
    assert (told.key, told.cause) == (settings.CALLS, "state.parameters_differ")
    assert (told.severity, told.ranks, told.first_step) == (Severity.ERROR, (1,), 10)
    assert told.numbers["other_causes"] == ["state.optimizer_differs"]
    assert "called never on rank 1, once on the others (step 10)" in words(told)


def test_updates_that_all_skip_are_healthy():
    detector = settings.DifferentSettings(4)
    for step in range(40):
        assert observe(detector, step, **alike(optimizer_steps=[int(step % 3 == 0)] * 4)) == []


def test_a_worker_without_data_in_join_is_not_compared():
    idle = alike(
        optimizer_steps=[1, 0, 1, 1], num_samples=[2, 0, 2, 2], lr=[1e-4, 9e-4, 1e-4, 1e-4]
    )
    assert run(settings.DifferentSettings(4), 20, **idle) == []


def planned(rates):
    return Plan.of({"learning_rate": rates})


def follow(detector, rates, start=0, calls=1):
    told = []
    for step, rate in enumerate(rates, start=start):
        told += observe(detector, step, lr=[rate] * 4, optimizer_steps=[calls] * 4)
    return told


WARM_UP = [1e-4 * (step + 1) for step in range(10)] + [1e-3] * 40
DECAY = [1e-3 * (1 - step / 100) for step in range(101)]


@pytest.mark.parametrize(
    ("exact", "rates"),
    [
        (DECAY, DECAY),
        (WARM_UP, [float(np.float32(rate)) for rate in WARM_UP]),
        (DECAY, DECAY[:10] + [np.nan] * 10 + DECAY[20:]),  # updates are counted where it is unknown
    ],
)
def test_a_schedule_that_is_kept_is_no_finding(exact, rates):
    assert follow(settings.DifferentSettings(4, planned(exact)), rates) == []


def test_a_scheduler_that_is_stepped_too_often_is_told_after_three_updates():
    detector = settings.DifferentSettings(4, planned(WARM_UP))
    told = follow(detector, [1e-4, 5e-4, 9e-4, 1e-3, 1e-3])[0]
    assert (told.cause, told.severity) == ("state.schedule", Severity.WARNING)
    assert (told.first_step, told.last_step, told.ranks) == (1, 3, ())
    said = "at call 3 of optimizer.step (from 0) it was 0.001, and the plan has 0.0004"
    assert said in words(told)


def test_updates_are_counted_not_steps():
    detector = settings.DifferentSettings(4, planned(WARM_UP))
    told = []
    for step in range(60):  # an update with every third step
        updates = int(step % 3 == 2)
        columns = {"lr": [WARM_UP[max(0, step - 2) // 3]] * 4, "optimizer_steps": [updates] * 4}
        told += observe(detector, step, **columns)
    assert told == []
    assert follow(settings.DifferentSettings(4, planned(DECAY)), DECAY[1::2], calls=2) == []


def test_a_restart_from_an_earlier_checkpoint_goes_on_from_there():
    before, after = (settings.DifferentSettings(4, planned(DECAY)) for _ in range(2))
    follow(before, DECAY[:40])
    after.restore(before.state())
    assert follow(after, DECAY[25:], start=40) == []


def test_a_schedule_that_moves_with_micro_batches_is_a_note():
    often = {"micro_batches": [4, 4], "lr_changes": [3, 3]}
    [told] = run(settings.ScheduleByPass(), 8, width=2, **often)
    assert (told.key, told.severity, told.count) == (settings.BY_PASS, Severity.NOTE, 8)
    assert "moves 4 times in an update" in words(told)
    for columns in (
        {"micro_batches": [1, 1], "lr_changes": [0, 0]},
        {**often, "lr_changes": [0, 0]},
    ):
        assert run(settings.ScheduleByPass(), 20, width=2, **columns) == []


def down(steps, end, peak=3e-3):
    return np.linspace(peak, end, steps).tolist()


@pytest.mark.parametrize(
    ("rates", "severity", "last"),
    [
        (down(41, 3e-5) + [3e-5] * 60, Severity.NOTE, 71),
        (down(201, 0.0) + [0.0] * 60, Severity.WARNING, 231),
    ],
)
def test_a_rate_that_rests_at_the_end_of_its_schedule(rates, severity, last):
    [found] = follow(settings.ScheduleEnded(), rates)
    assert (found.key, found.severity, found.last_step) == (settings.ENDED, severity, last)
    assert found.first_step == rates.index(rates[-1])
    assert ("has been 0" in words(found)) == (severity is Severity.WARNING)


@pytest.mark.parametrize(
    "rates",
    [
        down(40, 1e-3, peak=0.0) + [1e-3] * 400,  # a warm-up
        down(40, 1e-3, peak=0.0) + [1e-3] * 30 + [1e-4] * 30 + [1e-5] * 400,  # three rates
        down(40, 1e-3) + [1e-3] * 400,  # a third of the peak
        down(201, 3e-5) + [3e-5] * 100,
    ],
)
def test_other_schedules_are_silent(rates):
    assert follow(settings.ScheduleEnded(), rates) == []


def after_restart(before, after):
    first, second = settings.ScheduleJump(), settings.ScheduleJump()
    assert follow(first, before) == []
    second.restore(first.state())
    return follow(second, after)


def test_a_rate_that_jumps_at_a_restart():
    [found] = after_restart(down(70, 2e-3), [8e-4, 7.9e-4])
    assert (found.key, found.severity, found.first_step) == (settings.JUMPS, Severity.NOTE, 0)
    assert "jumps from 0.002 to 0.0008 at the restart" in words(found)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (down(70, 2e-3), [2.2e-3]),  # of a checkpoint some steps before
        ([1e-3] * 3, [1e-4]),  # too short to know
    ],
)
def test_a_rate_that_goes_on_is_silent(before, after):
    assert after_restart(before, after) == []
    assert follow(settings.ScheduleJump(), [*before, *after]) == []


@pytest.mark.parametrize(
    ("planned", "seeds"),
    [(42, (42, 42)), (None, (0, 0)), (42, (None, None))],
    ids=["as planned", "no plan", "unknown seeds"],
)
def test_nothing_is_said_without_a_difference(planned, seeds):
    detector = settings.PlannedSeed(planned, seeds)
    assert [observe(detector, step) for step in range(3)] == [[], [], []]


def test_another_seed_is_told_once_with_both_numbers():
    detector = settings.PlannedSeed(42, (0, 0, 0))
    (told,) = observe(detector, 7)
    assert (told.cause, told.key) == ("state.schedule", "seed-not-planned")
    assert (told.severity, told.ranks, told.first_step) == (Severity.WARNING, (0, 1, 2), 7)
    assert "shuffles with seed 0, and the plan declares 42" in words(told)
    assert "DistributedSampler" in words(told)
    assert observe(detector, 8) == []


def make_parameter():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return parameter


def test_settings_on_an_accelerator_are_not_waited_for():
    elsewhere = torch.tensor(0.5, device="meta")
    with pytest.raises(RuntimeError):
        float(elsewhere)  # what reading it would do
    meter = OptimizerMeter(torch.optim.SGD([make_parameter()], lr=0.5))
    digests = []
    for eps in (elsewhere, elsewhere.clone()):
        group = {"lr": elsewhere, "betas": (elsewhere, 0.9), "eps": eps, "momentum": 0.5}
        meter.after_update(SimpleNamespace(param_groups=[group]), complete=True)
        collected = meter.take()
        assert collected["optimizer_steps"] == 1
        assert math.isnan(collected["lr"])
        digests.append(collected["settings_digest"])
    assert digests[0] == digests[1]  # of the momentum alone


def test_an_update_that_a_gradient_scaler_skips_is_not_counted():
    parameter = make_parameter()
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    meter = OptimizerMeter(optimizer)
    optimizer.register_step_post_hook(lambda *_: meter.after_update(optimizer, complete=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    counts = []
    for factor in (1.0, float("inf"), 1.0):
        parameter.grad = None
        scaler.scale((factor * parameter).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        counts.append(meter.take()["optimizer_steps"])
    assert counts == [1, 0, 1]


@pytest.mark.parametrize(
    "optimizer",
    [
        object(),
        SimpleNamespace(param_groups=["weights"]),
        SimpleNamespace(param_groups=[{"lr": "auto", "weight_decay": None, 3: object()}]),
    ],
)
def test_what_an_exotic_optimizer_does_not_have_is_left_out(optimizer):
    meter = OptimizerMeter(torch.optim.SGD([make_parameter()], lr=0.5))
    meter.after_update(optimizer, complete=True)
    collected = meter.take()
    assert collected["optimizer_steps"] == 1
    assert math.isnan(collected["lr"])
    assert math.isnan(collected["weight_decay"])
