import importlib

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rankscope import Run
from rankscope.bus.bundles import unpack_batch
from rankscope.evidence.canary import schedule as canary_plan
from rankscope.evidence.canary.schedule import ASKED_FOR, CanaryAnswer, Planned
from support.loops import PLAN, collect_lines, collect_warnings, wait_for, watch
from support.ranks import run_ranks
from support.surroundings import SURROUNDINGS, WRAPPERS, Training

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

IMPORTED = ("torch.fx.experimental.proxy_tensor", "torch.utils.flop_counter")
UNDER_DDP_ALONE = (
    *("gradients of samples", "fake pass", "traced pass"),
    *("selective checkpoint", "save_on_cpu", "hooks forbidden", "flop counter", "profiler"),
)
"""Which FSDP2 itself does not bear, or which meet the same hooks as others; so without wrapper."""
NO_PASSES = ("func.grad",)
"""Whose forward passes are none that the monitor could measure."""
NO_CANARY = {
    "reentrant checkpoint": "a checkpoint runs the forward pass inside a backward pass",
    "dual level": "the forward pass runs under forward-mode differentiation",
}
VERIFIED = ("verify.agrees", "what one process")
OTHERWISE_VERIFIED = {
    "checkpoint without generators": ("verify.gradient", "is not what one process would"),
    "dual level": ("verify.declined", "forward-mode differentiation"),
}
"""Without the generators, a recomputation drops other units: the gradient is wrong indeed."""

STEPS = 6
KEEP, RUN, VERIFY = 2, 4, 5
"""In which of a surrounding's steps a batch is kept, a canary runs, and a gradient is computed
again; the others are only measured."""


def train(rank, wrapper, run_dir):
    canary_plan.LAG = 10**6  # none but those of the test
    collect_warnings()
    training = Training(rank, wrapper)
    scope = None
    if run_dir is not None:
        scope = watch(training.called, training.optimizer, run_dir=run_dir, plan=PLAN)
    said = collect_lines()
    results = {}
    for name in ways_of(wrapper):
        training.begin()
        canary = None if scope is None else scope._collector._probes.get("canary")
        root = None if canary is None else Root(scope, canary)
        first = -1 if scope is None else scope._collector.step
        wait_for(scope, first - 1)
        seen, raised = [], []
        for step in range(STEPS):
            if root is not None:
                root.before(step)
            if scope is not None and step == VERIFY:
                scope.verify()
            try:
                seen.append(SURROUNDINGS[name](training, *training.batch(step)))
            except Exception as error:
                raised.append((step, type(error).__name__, str(error)))
                training.optimizer.zero_grad()
            if scope is not None:
                scope._collector.close_step()
        steps = range(first, first if scope is None else scope._collector.step)
        results[name] = {"seen": seen, "raised": raised, "bits": training.bits(), "left": left()}
        results[name] |= {"said": said[:], "steps": steps}
        said.clear()
    if scope is not None:
        scope.close()
    return results


class Root:
    """Plays the root's part in a canary, which is to run in a certain step."""

    def __init__(self, scope, canary):
        self._scope, self._canary, self._answers = scope, canary, []
        canary._send = self._answers.append

    def before(self, step):
        now = self._scope._collector.step
        planned = Planned(ASKED_FOR, 0, 1, now, now)
        if step == KEEP:
            self._canary.store_plan(planned)
        if step == RUN:
            answers = [None] * 2
            dist.all_gather_object(answers, self._answers)
            kept = [CanaryAnswer.unpack(one).batch for several in answers for one in several]
            if len(kept) == len(answers) and all(kept):
                self._canary.store_batches(planned, tuple(map(unpack_batch, kept)))


def left():
    return [
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch.is_anomaly_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
    ]


def import_all():
    for name in IMPORTED:
        importlib.import_module(name)


def ways_of(wrapper):
    without = () if wrapper == "DDP" else UNDER_DDP_ALONE
    without += ("func.grad",) if wrapper == "FSDP2" else ()
    return [way for way in SURROUNDINGS if way not in without]


def train_alone_and_watched(rank, folder, wrapper):
    return [train(rank, wrapper, run_dir) for run_dir in (None, f"{folder}/{wrapper}")]


@pytest.fixture(scope="module", params=WRAPPERS)
def trained(request, folder):
    """Return a wrapper, what each rank has of each way, and the watched run."""
    given = (train_alone_and_watched, 2, str(folder), request.param)
    ranks = run_ranks(*given, timeout=300, prepare=import_all)
    return request.param, ranks, Run.open(folder / request.param)


def test_what_surrounds_a_step_sees_the_training_alone(trained):
    wrapper, ranks, _ = trained
    for way in ways_of(wrapper):
        for alone, watched in ((a[way], w[way]) for a, w in ranks):
            assert watched["raised"] == alone["raised"], way
            assert watched["seen"] == alone["seen"], way
            assert watched["bits"] == alone["bits"], way
            assert watched["left"] == alone["left"], way
            assert len(alone["raised"]) == (way == "anomaly mode"), way


def test_canaries_run_or_it_is_said_why_not(trained):
    wrapper, ranks, run = trained
    if wrapper == "FSDP2":
        return  # it has none
    steps, of_TW = run.per_worker("canary_of")
    ran = {int(step) for step, row in zip(steps, of_TW, strict=True) if np.isfinite(row).all()}
    for way in ways_of(wrapper):
        for _, watched in ranks:
            kept = watched[way]
            declined = [line for line in kept["said"] if line.startswith("no canary")]
            if way in NO_CANARY:
                assert not ran & set(kept["steps"]), way
                assert [NO_CANARY[way] in line for line in declined] == [True], way
            elif way not in NO_PASSES:
                assert len(ran & set(kept["steps"])) == 1, way
                assert not declined, way


def test_gradients_are_computed_again_or_it_is_said_why_not(trained):
    wrapper, ranks, run = trained
    verified = [finding for finding in run.findings() if finding.id.startswith("verify")]
    for way in ways_of(wrapper):
        steps = ranks[0][1][way]["steps"]
        here = [finding for finding in verified if finding.first_step in steps]
        cause, words = OTHERWISE_VERIFIED.get(way, VERIFIED)
        if way not in NO_PASSES:
            assert [finding.cause for finding in here] == [cause], way
            assert words in here[0].explanation, way


def test_a_recomputed_forward_pass_counts_once(trained):
    wrapper, ranks, run = trained
    steps, micro_TW = run.per_worker("micro_batches")
    for way in ways_of(wrapper):
        here = np.isin(steps, ranks[0][1][way]["steps"])
        assert set(micro_TW[here].flatten()) == {1.0} or way in NO_PASSES, way
