import copy
import gc
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from rankscope import Run, Severity
from rankscope.bus.evidence import Table
from support.loops import watch
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

STEPS = 12


class Average(nn.Module):
    """An average whose decay grows with the number of updates, inside of the watched module."""

    def __init__(self, model):
        super().__init__()
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.updates = 0

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        decay = 0.99 * (1 - math.exp(-self.updates / 3))
        for mean, new in zip(self.model.parameters(), model.parameters(), strict=True):
            mean.lerp_(new, 1 - decay)


class Task(nn.Module):
    def __init__(self, *norms):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 6), *norms, nn.Tanh(), nn.Linear(6, 6))
        self.average = Average(self.model)

    def forward(self, x):
        return self.model(x).square().mean()


def frozen(model):
    return copy.deepcopy(model).requires_grad_(False)


def follow(copies, source, share=1.0):
    """Return what moves copies by a share of their way; copies of other names are a list."""

    @torch.no_grad()
    def after_update():
        for own, new in zip(copies.parameters(), source.parameters(), strict=True):
            own.lerp_(new.to(own.dtype), share)

    return after_update


def with_buffers(task, *, follow_too, training=False):
    """Return what moves an average's parameters, and perhaps its buffers."""
    teacher = frozen(task.model).train(training)
    moves = follow(teacher, task.model, 0.1)

    @torch.no_grad()
    def after_update():
        moves()
        for own, new in zip(teacher.buffers(), task.model.buffers(), strict=True):
            if follow_too:
                own.copy_(new)

    return after_update


def averaged(task):
    average = AveragedModel(task.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return lambda: average.update_parameters(task.model)


class Kept:
    """An average in a plain dict, made in the first update; each update makes new tensors."""

    def __init__(self, share, prefix=""):
        self.share, self.prefix, self.shadow = share, prefix, {}

    @torch.no_grad()
    def update(self, model):
        named = {self.prefix + name: p.detach() for name, p in model.named_parameters()}
        self.shadow = self.shadow or {name: p.clone() for name, p in named.items()}
        for name in self.shadow.keys() & dict(model.named_parameters()):
            self.shadow[name] = self.shadow[name].lerp(named[name], self.share(dist.get_rank()))


KINDS = {
    "grows": lambda task: lambda: task.average.update(task.model),
    "engine": lambda task: follow(nn.ModuleList(frozen(task.model)), task.model),
    "engine of base": lambda task: follow(nn.ModuleList(frozen(task.model)), frozen(task.model)),
    "narrow": lambda task: follow(frozen(task.model).bfloat16(), task.model, 0.01),
    "narrow copy": lambda task: follow(frozen(task.model).bfloat16(), task.model),
    "averaged": averaged,
    "buffers rest": partial(with_buffers, follow_too=False),
    "buffers follow": partial(with_buffers, follow_too=True),
    "buffers of training": partial(with_buffers, follow_too=False, training=True),
    "kept": lambda task: partial(Kept(lambda rank: 0.1).update, task.model),
    "kept apart": lambda task: partial(Kept(lambda rank: 0.2 - 0.1 * rank).update, task.model),
    "kept at rest": lambda task: partial(Kept(None, "_orig_mod.").update, task.model),
}


def train(rank, run_dir, kind, steps=2 * STEPS, earlier=None, *, counts=True):
    torch.manual_seed(0)
    task = Task(*[nn.BatchNorm1d(6)] * kind.startswith("buffers"))
    wrapped = DistributedDataParallel(task)
    holder = nn.ModuleList([wrapped])  # leads to the same modules
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.05)
    after_update = KINDS[kind](task)
    torch.manual_seed(1 + rank)
    if earlier is not None:
        task.load_state_dict(earlier.state_dict())
        task.average.updates = earlier.average.updates if counts else 0
    with watch(wrapped, optimizer, run_dir=run_dir, canary=False):
        for _ in range(steps):
            wrapped(torch.randn(4, 6)).backward()
            optimizer.step()
            optimizer.zero_grad()
            after_update()
    del holder
    return task


def train_all(rank, folder):
    for counts in (True, False):
        path = f"{folder}/{'grows' if counts else 'forgotten'}"
        train(rank, path, "grows", STEPS, train(rank, path, "grows", STEPS), counts=counts)
    path = f"{folder}/anew"
    train(rank, path, "kept", STEPS, train(rank, path, "kept", STEPS))
    for kind in [*KINDS][1:]:
        gc.collect()  # modules of the training before
        train(rank, f"{folder}/{kind}", kind)
    train_sharded(f"{folder}/sharded")


@pytest.fixture(scope="module", autouse=True)
def trained(folder):
    run_ranks(train_all, 2, str(folder), timeout=240)


def found_in(folder, name):
    starts = "state.average_", "state.copy_"
    return [one for one in Run.open(folder / name).findings() if one.cause.startswith(starts)]


HEALTHY = (
    *("grows-2", "engine", "narrow copy", "averaged", "kept", "anew"),
    *("buffers follow", "buffers of training"),
)


@pytest.mark.parametrize("name", HEALTHY)
def test_copies_that_follow_the_model_are_healthy(folder, name):
    assert found_in(folder, name) == []


SHARE = 1 - 0.99 * (1 - math.exp(-1 / 3))


@pytest.mark.parametrize(
    ("name", "cause", "said"),
    [
        ("forgotten-2", "state.average_jumps", f"goes {SHARE:.3g} of its way to the model"),
        ("engine of base", "state.copy_never_changes", "ModuleList (84 elements) is written"),
        ("narrow", "state.average_rounded", "Sequential (84 elements) is kept in 16 bits"),
        (
            "buffers rest",
            "state.average_buffers_rest",
            "Sequential (96 elements) follows the model",
        ),
        ("anew-2", "state.average_begins_anew", "Kept.shadow (84 elements) has begun again"),
        ("kept apart", "state.average_differs", "0.2 on rank 0, 0.1 on rank 1"),
        ("kept at rest", "state.average_rests", "Kept.shadow (84 elements), which is named"),
    ],
)
def test_a_copy_that_jumps_rests_or_is_lost_in_rounding_is_named(folder, name, cause, said):
    [found] = found_in(folder, name)
    note = cause == "state.average_rests"
    assert (found.cause, found.severity is Severity.NOTE) == (cause, note)
    assert said in found.explanation
    assert found.first_step == STEPS or name != "forgotten-2"


def train_sharded(run_dir):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    average = frozen(model)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with watch(model, optimizer, run_dir=run_dir, canary=False):
        for _ in range(STEPS):
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mean, new in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(new.full_tensor(), 0.1)


def test_a_whole_average_beside_a_sharded_model_is_left_alone(folder):
    run = Run.open(folder / "sharded")
    assert run.num_rows(Table.STEPS) == STEPS
    assert not [finding for finding in run.findings() if finding.cause.startswith("state.")]
