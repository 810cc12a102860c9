"""Canaries with root and workers in one process: real models, messages as bytes, no sockets."""

import functools
import logging
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from rankscope.bus.finding import Finding, Severity
from rankscope.bus.probe import StepEnd
from rankscope.evidence.canary import cost as canary_memory
from rankscope.evidence.canary.batch import CanaryDeclined
from rankscope.evidence.canary.cost import StepMemory
from rankscope.evidence.canary.director import CanaryDirector
from rankscope.evidence.canary.probe import CanaryProbe
from rankscope.evidence.canary.schedule import SPACING, first_scheduled
from rankscope.stats.arrays import MISSING_INT
from rankscope.wrappers.ddp_model import DDP
from rankscope.wrappers.wrapped import Wrapped
from support.models import make_batch, make_model
from support.streams import gathered

CPU = torch.device("cpu")
OUTLIER = Finding("rank-1", "data.worker_outlier", Severity.WARNING, (1,), 0, 5, "", "")


class Wrapper(nn.Module):
    """Stands for DDP: has the model inside, and no other worker."""

    def __init__(self, module):
        super().__init__()
        self.module = module


class Worker:
    """One rank: a model, its optimizer, random generators of its own, and a probe's canaries."""

    def __init__(self, rank, send, first):
        self.rank = rank
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(100 + rank)
        self.generator = torch.get_rng_state()
        self.inbox = []
        self.canary = None
        if send is not None:
            group = None
            parameters = dict(self.model.named_parameters())
            wrapped = Wrapped(DDP, Wrapper(self.model), parameters, group, CPU)
            self.canary = CanaryProbe(wrapped, rank, send, first=first)

    def read(self, step):
        come = [message for at, message in self.inbox if at <= step]
        self.inbox = [(at, message) for at, message in self.inbox if at > step]
        for message in come:
            self.canary.on_request(message.step, message.content)

    def compute(self, step):
        torch.set_rng_state(self.generator)
        batch = make_batch(self.rank, step)
        if self.canary is not None:
            self.read(step)
            self.canary.before_pass(step, (), batch)
            if self.canary.run_due:
                self.canary.run_model(step, early=False)
        self.model(**batch)["loss"].backward()
        self.generator = torch.get_rng_state()
        end = StepEnd(step, comparable=True, idle=frozenset(), num_passes=1)
        pending = None if self.canary is None else self.canary.collect(end)
        return {} if pending is None else dict(pending.read().values)


class Job:
    """A training of W workers, and the root that sees its steps some steps later."""

    def __init__(self, num_workers=3, *, watched=True, every=None, run_dir=None, lag=2):
        self.lines = []
        self.director = CanaryDirector(num_workers, every=every, run_dir=run_dir)
        self.director._log = lambda *line: self.lines.append(line)
        self.answers = []
        first = first_scheduled(0, by_default=every is None)
        self.workers = [
            Worker(rank, (lambda c, rank=rank: self.answer(rank, c)) if watched else None, first)
            for rank in range(num_workers)
        ]
        self.lag, self.step = lag, 0
        self.begins = self.shown = 0
        self.set_to_none = True
        self.seen = []
        self.late = {}
        self.known = []

    def answer(self, rank, content):
        self.answers.append((self.step + self.lag, rank, content))

    def run(self, steps, told=None):
        for _ in range(steps):
            self.one_step()
            if self.workers[0].canary is not None:
                self.see(told or [])
                told = None
            self.step += 1
        return self

    def one_step(self):
        said = [worker.compute(self.step) for worker in self.workers]
        for gradients in zip(*([p.grad for p in w.model.parameters()] for w in self.workers)):  # noqa: B905
            mean = torch.stack(gradients).mean(0)
            for gradient in gradients:
                gradient.copy_(mean)
        for worker in self.workers:
            worker.optimizer.step()
            worker.optimizer.zero_grad(set_to_none=self.set_to_none)
        names = {name for values in said for name in values}
        missing = {
            n: np.nan if n.endswith(("loss", "norm", "seconds")) else MISSING_INT for n in names
        }
        columns = {n: [values.get(n, missing[n]) for values in said] for n in names}
        samples = [np.arange(2)] * len(self.workers)
        seconds = [0.1] * len(self.workers)
        self.seen.append(gathered(self.step, samples, step_seconds=seconds, **columns))

    def see(self, told):
        out = []
        if self.step < self.begins:
            return
        newest = self.step - self.lag
        for _, rank, content in [one for one in self.answers if one[0] <= self.step]:
            self.director.take(rank, 0, content)
        self.answers = [one for one in self.answers if one[0] > self.step]
        for step in self.seen[self.shown : newest + 1]:
            self.shown += 1
            self.known += told
            out += self.director.observe(step, told, self.known, newest)
            told = []
        for worker in self.workers:
            at = self.step + self.lag + self.late.get(worker.rank, 0)
            worker.inbox += [(at, message) for message in out]

    @property
    def ran(self):
        return [s.step for s in self.seen if (s.workers["canary_digest"] != MISSING_INT).all()]

    def bits(self):
        return [
            (
                [value.numpy().tobytes() for value in worker.model.state_dict().values()],
                [s["momentum_buffer"].numpy().tobytes() for s in worker.optimizer.state.values()],
                worker.generator.numpy().tobytes(),
            )
            for worker in self.workers
        ]


@functools.cache
def bits_unwatched(num_workers, steps):
    return Job(num_workers, watched=False).run(steps).bits()


@pytest.mark.parametrize(("num_workers", "lag"), [(2, 0), (3, 7)])
def test_the_first_canary_runs_within_50_steps_and_leaves_no_trace(num_workers, lag, caplog):
    random.seed(1)
    job = Job(num_workers, lag=lag).run(60)
    assert len(job.ran) == 1
    assert job.ran[0] <= 50
    assert job.bits() == bits_unwatched(num_workers, 60)
    digests = job.seen[job.ran[0]].workers["canary_digest"]
    assert len({*digests}) == 1
    assert (job.seen[job.ran[0]].workers["canary_seconds"] > 0).all()
    assert [level for level, _ in job.lines] == [logging.INFO]
    assert caplog.records == []


def test_those_that_follow_take_turns_within_a_share_of_the_time_and_are_not_announced(monkeypatch):
    cost = 0.05
    monkeypatch.setattr("rankscope.evidence.canary.cost.Stopwatch.seconds", cost)
    job = Job(2).run(3 * SPACING + 150)  # steps of 0.1 s: cost / share is 250 steps
    assert len(job.ran) == 3
    assert np.diff(job.ran).min() >= cost / 0.002 / 0.1
    assert [job.seen[step].workers["canary_of"].tolist() for step in job.ran] == [
        [0, 0],
        [1, 1],
        [0, 0],
    ]
    assert len(job.lines) == 1


def test_all_run_it_in_the_same_step_or_it_is_put_off_further_ahead(tmp_path):
    job = Job(4, every=10_000, run_dir=tmp_path).run(60)
    first = list(job.ran)
    job.late[3] = 14  # longer than the 16 steps ahead leave, with twice the lag
    job.run(250, [OUTLIER])
    [line] = [line for _, line in job.lines][1:]
    assert "before step" in line
    assert len(job.ran) == 2
    ran_W = [(s.workers["canary_digest"] != MISSING_INT).sum() for s in job.seen]
    assert sorted(ran_W)[-3:] == [3, 4, 4]  # one rank had come too late
    assert job.ran[0] == first[0]
    assert job.bits() == bits_unwatched(4, 310)


def test_a_worker_that_hears_of_it_late_for_good_costs_nothing_but_the_canary():
    job = Job(3)
    job.late[2] = 1000  # the peer
    job.run(150)
    assert job.ran == []
    assert job.bits() == bits_unwatched(3, 150)


def test_while_gradients_are_held_none_runs_that_nobody_asked_for(caplog):
    caplog.set_level(logging.INFO)
    job = Job(2)
    job.set_to_none = False
    job.run(200)
    assert job.ran == []
    assert len(caplog.records) == 2  # one on each rank, though it is tried again
    assert "gradients are held" in caplog.text
    asked = Job(2, every=100)
    asked.set_to_none = False
    assert len(asked.run(60).ran) == 1


def test_a_canary_that_finds_no_memory_is_the_last_one(caplog):
    job = Job(3, every=50)
    canaries = {worker.rank: worker for worker in job.workers}

    def fill(module, args, output):
        if torch.initial_seed() > 1000:  # in a canary
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return output

    canaries[1].model.head.register_forward_hook(fill)
    job.run(150)
    assert job.ran == []
    ran = [s.step for s in job.seen if (s.workers["canary_digest"] != MISSING_INT).any()]
    assert len(ran) == 1
    [record] = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "no more canaries" in record.getMessage()
    [line] = [line for _, line in job.lines if "no more canaries" in line]
    assert "rank 1" in line
    assert job.bits() == bits_unwatched(3, 150)


def test_batches_that_never_come_are_given_up():
    job = Job(3, every=1000)
    job.workers[0].canary._send = lambda content: None
    job.run(400)
    assert job.ran == []
    [(_, line)] = job.lines
    assert "did not send its batch in time" in line


# Memory ---------------------------------------------------------------------------------------


class Allocator:
    """Stands for an accelerator's: what lies there, the highest peak, and what is left."""

    def __init__(self, *, free):
        self.allocated, self.peak, self.free = 100, 100, free

    def step(self, *, takes):
        self.peak = max(self.peak, self.allocated + takes)

    def stats(self, device):
        return {
            "allocated_bytes.all.current": self.allocated,
            "allocated_bytes.all.peak": self.peak,
        }


def memory_of(allocator, monkeypatch):
    on_device = SimpleNamespace(memory_stats=allocator.stats)
    monkeypatch.setattr(torch, "get_device_module", lambda device: on_device)
    monkeypatch.setattr(canary_memory, "_free", lambda device, leave=0: allocator.free)
    return StepMemory(torch.device("cuda", 0))


@pytest.mark.parametrize(("free", "fits"), [(55 + 40, True), (55 + 39, False)])
def test_there_must_be_room_for_another_step_and_its_gradients(free, fits, monkeypatch):
    allocator = Allocator(free=free)
    memory = memory_of(allocator, monkeypatch)
    parameters = [torch.zeros(10)]  # 40 bytes
    for takes in (30, 50, 20):
        memory.see()
        allocator.step(takes=takes)
    memory.see()
    if fits:
        memory.check(parameters)
    else:
        with pytest.raises(CanaryDeclined, match="needs room for what a step takes"):
            memory.check(parameters)
