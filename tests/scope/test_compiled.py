import logging
import warnings
from contextlib import ExitStack
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankscope import Run, Severity
from rankscope.bus.evidence import Table
from support.loops import watch
from support.ranks import alone_and_watched

pytestmark = pytest.mark.ranks

STEPS = 4


class Net(nn.Module):
    """Dynamo traces the hooks of modules that are not torch's own; a graph ends with a bucket."""

    def __init__(self, *widths):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(n, m) for n, m in pairwise(widths)))
        self.head = nn.Linear(widths[-1], 1)

    def forward(self, inputs):
        return self.head(self.layers(inputs).relu())


def build(way, net, watch):
    where, when = way.split(", ")
    model = net if where.startswith("loop") else DistributedDataParallel(net)
    if when == "after":
        watch(model)
    called = model
    if where.endswith("in place"):
        model.compile(backend="eager", fullgraph=where.startswith("loop"))
    elif where.endswith("function"):
        called = torch.compile(lambda inputs: model(inputs) * 2, backend="eager", fullgraph=True)
    elif not where.endswith(("optimizer", "whole step")):
        called = torch.compile(model, backend="eager", fullgraph=where.startswith("loop"))
    if when == "before":
        watch(called if isinstance(called, nn.Module) else model)
    return called


WAYS = [
    "DDP, after",
    "DDP of several buckets, before",
    "DDP in place, after",
    "loop, before",
    "loop in a function, after",
    "DDP with its optimizer, after",
    "DDP in a whole step, after",
]


def make_step(way, net, called, optimizer):
    update = optimizer.step
    if "optimizer" in way:
        update = torch.compile(update, backend="eager")

    def step(inputs):
        called(inputs).square().mean().backward()
        if way.startswith("loop"):
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad)
        update()
        optimizer.zero_grad()

    return torch.compile(step, backend="eager") if "whole step" in way else step


def count_graphs(rank, way, run_dir):
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()
    torch.manual_seed(0)
    net = Net(4, 600, 600, 600) if "buckets" in way else Net(4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with ExitStack() as watched:

        def begin(model):
            watched.enter_context(watch(model, optimizer, run_dir=run_dir))

        step = make_step(way, net, build(way, net, begin), optimizer)
        for number in range(STEPS):
            step(torch.randn(3, 4, generator=torch.Generator().manual_seed(2 * number + rank)))
    counted = torch._dynamo.utils.counters
    facts = {"bits": net.head.weight.detach().numpy().tobytes()}
    facts["graphs"] = counted["stats"]["unique_graphs"], counted["stats"]["calls_captured"]
    if "optimizer" not in way and "whole step" not in way:  # an optimizer's hooks are breaks, too
        kinds = [(why.split("\n")[0], times) for why, times in counted["graph_break"].items()]
        facts["breaks"] = sorted(kinds)
        facts["compilations"] = len(torch._dynamo.utils.get_compilation_metrics())
    return facts


counted = alone_and_watched(count_graphs, WAYS, 2)


def test_a_watched_model_compiles_to_the_same_graphs_before_and_after_watch(counted):
    for way in WAYS:
        for alone, watched in (results[way] for results in counted[0]):
            assert watched == alone, way
            assert alone["graphs"][0] > 0, way
        run = Run.open(counted[1] / way)
        assert run.table(Table.STEPS).num_rows == STEPS, way
        assert run.table(Table.WORKERS)["grad_norm"].null_count == 0, way


def script(*layers):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(nn.Sequential(*layers))


def train_script(rank, way, run_dir):
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
    net = script(*layers) if way == "whole" else nn.Sequential(script(*layers), nn.Linear(8, 1))
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    draw = torch.Generator().manual_seed(rank)
    with watch(ddp, optimizer, run_dir=run_dir, verify_at=[2]):
        for _ in range(STEPS):
            for passes in range(3):
                with ExitStack() if passes == 2 else ddp.no_sync():
                    ddp(torch.randn(6, 4, generator=draw)).square().mean().div(3).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [state.numpy().tobytes() for state in net.state_dict().values()]


SCRIPTS = {"whole": "verify.declined", "part": "verify.agrees"}

scripted = alone_and_watched(train_script, [*SCRIPTS], 2)


@pytest.mark.parametrize("way", SCRIPTS)
def test_a_model_in_torch_script_is_measured_and_not_changed(scripted, way):
    for alone, watched in (results[way] for results in scripted[0]):
        assert watched == alone
    run = Run.open(scripted[1] / way)
    assert run.table(Table.STEPS).num_rows == STEPS
    assert run.table(Table.WORKERS)["grad_norm"].null_count == 0
    assert run.table(Table.WORKERS)["param_digest"].null_count == 0
    found = {finding.id.partition(":")[0]: finding.severity for finding in run.findings()}
    assert found.keys() == {"running-statistics", SCRIPTS[way], "update.agrees"}
    assert set(found.values()) == {Severity.NOTE}
