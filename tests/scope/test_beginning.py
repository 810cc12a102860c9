import io
import logging
import re
import time
from typing import get_type_hints

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import rankscope
from rankscope import Run, WatchOptions, watch
from rankscope.bus.evidence import Table
from rankscope.bus.plan import Tier
from rankscope.errors import UnsupportedError, UsageError
from rankscope.session.options import WatchKeywords, chosen_tier
from rankscope.session.start import log_to_stderr
from rankscope.wrappers import rendezvous
from support.loops import Loop, train_watched
from support.models import make_model
from support.ranks import on_ranks, run_ranks

pytestmark = pytest.mark.ranks

# Options ----------------------------------------------------------------------------------------


def test_editors_and_type_checkers_know_every_option():
    assert get_type_hints(WatchKeywords) == get_type_hints(WatchOptions)


def test_options_come_from_the_object_and_by_name():
    given = WatchOptions(every=10)
    assert WatchOptions.of(None, {}) == WatchOptions()
    assert WatchOptions.of(given, {}) == given
    assert WatchOptions.of(None, {"every": 10}) == given
    assert WatchOptions.of(given, {"seed": 3}) == WatchOptions(every=10, seed=3)


@pytest.mark.parametrize(
    ("options", "named", "said"),
    [
        (None, {"evry": 2}, "watch() has no option 'evry'; did you mean 'every'?"),
        (WatchOptions(every=2), {"every": 2}, "got every by its name and in options"),
        (None, {"every": 0}, "every must be a whole number of steps, 1 or more, got 0"),
        (None, {"every": "10"}, "every must be a whole number of steps, 1 or more, got '10'"),
        (None, {"evidence": "no"}, "evidence must be True or False, got 'no'"),
        (None, {"overhead_budget": "1%"}, "overhead_budget must be a number of 0 or more"),
        (None, {"hang_seconds": -1}, "hang_seconds must be a number of 0 or more, got -1"),
        (None, {"parity": [1]}, "parity expected a number of steps, got [1]"),
        (None, {"process_group": "world"}, "process_group expected a group of torch.distributed"),
        (None, {"agent": "host"}, "agent must be 'process' or 'thread', got 'host'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_meant_is_refused(options, named, said):
    with pytest.raises(UsageError) as raised:
        WatchOptions.of(options, named)
    assert said in str(raised.value)


MODEL = "a model, or a list of models, and then the optimizer"
OPTIMIZER = (
    "an optimizer with param_groups, or several in a list, got {}: watch(model, optimizer, …)"
)
OTHERS = (
    "the optimizer of this model, got one that holds none of its parameters; make it from "
    "model.parameters(), after all changes of the model"
)
ENDLESS = (
    "plain values in config, got some that cannot be read (RecursionError), or that hold themselves"
)


def refused(_, folder):
    model = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    other_model = nn.Linear(2, 3)
    other = torch.optim.SGD(other_model.parameters(), lr=0.1)
    endless = {}
    endless["again"] = endless
    for wrong, words in (
        ({"model": optimizer, "optimizer": model}, f"{MODEL}, got SGD"),
        ({"model": None}, f"{MODEL}, got NoneType"),
        ({"optimizer": torch.optim.AdamW}, OPTIMIZER.format("the class AdamW")),
        ({"optimizer": "adam"}, OPTIMIZER.format("str")),
        ({"optimizer": [optimizer, schedule]}, OPTIMIZER.format("StepLR")),
        ({"optimizer": other}, OTHERS),
        ({"optimizer": other, "model": [model, DistributedDataParallel(nn.Linear(2, 2))]}, OTHERS),
        ({"optimizer": other, "model": replicate(nn.Linear(2, 2))}, OTHERS),
        ({"run_dir": None}, "run_dir to be a path, got NoneType"),
        ({"on_finding": "print"}, "on_finding to be a function of a finding, got str"),
        ({"config": endless}, ENDLESS),
    ):
        with pytest.raises(UsageError) as raised:
            watch(**{"model": model, "optimizer": optimizer, "run_dir": folder, **wrong})
        assert str(raised.value).endswith(f"watch() expected {words}")


def test_what_is_no_model_optimizer_or_path_is_refused_on_all_ranks(tmp_path):
    run_ranks(refused, 2, str(tmp_path))


@pytest.mark.parametrize(
    ("tier", "said"),
    [
        ("exact", "was removed: use tier='sketch'"),
        ("all", "tier must be one of 'scalars', 'sketch', got 'all'"),
    ],
)
def test_a_tier_that_is_not_there_is_refused(tier, said):
    with pytest.raises(UsageError, match=said):
        chosen_tier(tier)


def test_what_is_read_of_the_reduced_gradient_follows_from_the_tier():
    assert [WatchOptions().reads(tier) for tier in Tier] == ["norm", "sketch"]
    assert WatchOptions(reduced="off").reads(Tier.SKETCH) == "off"
    with pytest.raises(UsageError, match="the scalars tier reads reduced='norm', got 'off'"):
        WatchOptions(reduced="off").reads(Tier.SCALARS)


# What is watched --------------------------------------------------------------------------------


def python_reducer():
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        return DistributedDataParallel(make_model())
    finally:
        torch._dynamo.config.optimize_ddp = True


def mixed_precision():
    return DistributedDataParallel(
        make_model(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16)
    )


def delayed_reduction():
    model = make_model()
    return DistributedDataParallel(
        model,
        delay_all_reduce_named_params=[("head.bias", model.head.bias)],
        param_to_hook_all_reduce=model.embedding.weight,
    )


def several_devices():
    ddp = DistributedDataParallel(make_model())
    ddp.module.head.bias = torch.nn.Parameter(torch.empty(50, device="meta"))
    return ddp


def of_fairscale():
    """Stands for a wrapper of fairscale, which is not installed: it is known by its module."""
    kind = type("ShardedDataParallel", (torch.nn.Sequential,), {})
    kind.__module__ = "fairscale.nn.data_parallel.sharded_ddp"
    return kind(make_model())


REFUSED = {
    "ShardedDataParallel": of_fairscale,
    "python_reducer": python_reducer,
    "delay_all_reduce_named_params": delayed_reduction,
    "cpu, meta": several_devices,
}
if torch.version.cuda is None or torch.cuda.is_available():  # else torch itself fails first
    REFUSED["mixed_precision"] = mixed_precision


def test_one_process_alone_is_told_to_start_several(tmp_path):
    with pytest.raises(UnsupportedError, match="after init_process_group, got TinyLM") as caught:
        rankscope.watch(make_model(), run_dir=tmp_path / "run")
    assert re.search("in a process without others; start .* torchrun", str(caught.value))


class Shell(torch.nn.Module):
    """Calls a wrapped model, and has no parameters of its own, as Fabric's module."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, inputs):
        return self.inner(inputs)


def try_all(rank, folder):
    problems = []
    for make in REFUSED.values():
        with pytest.raises(UnsupportedError) as caught:
            rankscope.watch(make(), run_dir=f"{folder}/refused")
        problems.append(str(caught.value))
    for name, wrap in {"DDP": DistributedDataParallel, "FSDP2": fully_shard}.items():
        model = Shell(wrap(torch.nn.Linear(4, 2)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def loss_of(step, model=model):
            return model(torch.randn(8, 4)).square().mean()

        train_watched(model, optimizer, f"{folder}/{name}", 3, loss_of)
    return problems


tried = on_ranks(try_all, 2)


def test_what_cannot_be_watched_is_refused_in_one_sentence(tried):
    for problems in tried[0]:
        for name, problem in zip(REFUSED, problems, strict=True):
            assert problem.startswith("watch() expected")
            assert f"got {name}" in problem.replace("optimize_ddp='python_reducer'", name)
            assert ". " not in problem
    assert not (tried[1] / "refused").exists()


def test_a_module_that_only_calls_a_wrapped_model_is_watched_as_that_model(tried):
    for name in ("DDP", "FSDP2"):
        run = Run.open(tried[1] / name)
        assert run.info["options"]["parallel"] == name
        assert len(list(run.iter_reports())) == 3


# What one rank cannot do alone ------------------------------------------------------------------


@pytest.fixture
def written(monkeypatch):
    """Return what the root logger writes, as a script has configured it; ours is as imported."""
    logger, root = logging.getLogger("rankscope"), logging.getLogger()
    for name, value in (("handlers", []), ("propagate", True), ("level", logging.WARNING)):
        monkeypatch.setattr(logger, name, value)
    written = io.StringIO()
    monkeypatch.setattr(root, "handlers", [logging.StreamHandler(written)])
    return written


def test_the_monitor_speaks_on_stderr_wherever_the_root_logger_writes(written, capsys):
    log_to_stderr()
    log_to_stderr()
    logging.getLogger("rankscope").warning("heard \x1b[2Jin %s", "run\a")
    assert (written.getvalue(), *capsys.readouterr()) == ("", "", "rankscope: heard  [2Jin run \n")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_logger_that_is_configured_by_name_is_the_users(written, capsys, when):
    own, logger = io.StringIO(), logging.getLogger("rankscope")
    if when == "after":
        log_to_stderr()
    logger.addHandler(logging.StreamHandler(own))
    log_to_stderr()
    logger.warning("heard\a")
    assert (own.getvalue(), *capsys.readouterr()) == ("heard \n", "", "")
    assert written.getvalue() == ("heard \n" if when == "before" else "")


class NoTokenizer:
    def get_vocab(self):
        raise LookupError("no vocabulary file")


def problem_of(ddp, run_dir, **options):
    try:
        rankscope.watch(ddp, run_dir=run_dir, **options)
    except rankscope.RankscopeError as error:
        return type(error).__name__, str(error)
    return "", ""


def begin_badly(rank, folder):
    ddp = DistributedDataParallel(make_model())
    frozen = DistributedDataParallel(make_model())
    for parameter in list(frozen.parameters())[:2] if rank == 1 else []:
        parameter.requires_grad_(False)
    staged = DistributedDataParallel(make_model())
    for name, parameter in staged.module.named_parameters():
        parameter.requires_grad_(name.startswith("embedding") == (rank == 0))
    problems = {
        "long name": problem_of(ddp, f"{folder}/{'x' * 300}"),
        "no config": problem_of(ddp, f"{folder}/none", config=1 if rank == 1 else None),
        "webhook": problem_of(ddp, f"{folder}/webhook", sinks=["webhook:http://[::1"]),
        "tokenizer": problem_of(ddp, f"{folder}/t", tokenizer=NoTokenizer() if rank == 1 else {}),
        "usage": problem_of(ddp, f"{folder}/u", tokenizer=3 if rank == 1 else {}),
        "frozen": problem_of(frozen, f"{folder}/f"),
        "staged": problem_of(staged, f"{folder}/s"),
    }
    return problems, Loop(rank, f"{folder}/run").train(1)


def test_every_rank_hears_what_one_cannot_do(tmp_path):
    (first, quiet), (second, quiet_too) = run_ranks(begin_badly, 2, str(tmp_path))
    assert first == second
    kinds = {name: kind for name, (kind, _) in first.items()}
    assert kinds.pop("webhook")
    usage = ("no config", "usage", "frozen", "staged")
    assert kinds == {name: "UsageError" if name in usage else "RunError" for name in kinds}
    assert "rank 1 cannot begin to watch (LookupError: no vocabulary" in first["tokenizer"][1]
    assert "expected config to map names to values, got int" in first["no config"][1]
    assert "expected a tokenizer" in first["usage"][1]
    assert "trained on rank 0 alone" in first["frozen"][1]
    assert "ties or adds parameters on some ranks only" in first["frozen"][1]
    assert "as stages of a pipeline have, are not compared" in first["staged"][1]
    assert [quiet, quiet_too] == [[], []]
    assert Run.open(tmp_path / "run").table(Table.STEPS).num_rows == 1


def meet_in_attempts(rank):
    """Meet as the processes of four attempts of a job would, in a store that is kept."""
    said = []
    for attempt in range(4):
        rendezvous._meetings.clear()
        own = rendezvous.Rendezvous(dist.group.WORLD)
        if attempt == 2:  # in which rank 0 ends before it gets there
            own.patience_seconds = 0.05
            if rank == 1:
                with pytest.raises(rendezvous.LateError, match="rank 0"):
                    own.gather(b"2")
        else:
            if rank == 0:
                time.sleep(0.1)
            hellos = own.gather(str(attempt).encode())
            if hellos is not None:
                own.write("answer", b" ".join(hellos))
            said.append(own.read("answer")[0])
        dist.barrier()  # the next attempt begins when this one has ended everywhere
    return said


def test_attempts_of_a_job_do_not_hear_each_other():
    assert run_ranks(meet_in_attempts, 2) == [[b"0 0", b"1 1", b"3 3"]] * 2


def train_alone(rank, folder):
    rendezvous.PATIENCE_SECONDS = 0.3
    return Loop(rank, f"{folder}/run" if rank == 0 else None).train(3)


def test_a_rank_that_does_not_watch_holds_up_nobody_for_long(tmp_path):
    warnings, none = run_ranks(train_alone, 2, str(tmp_path))
    assert none == []
    assert len(warnings) == 1
    assert "training goes on" in warnings[0]
    assert "none came from worker 1 within 0.3 s" in warnings[0]
    assert not list(tmp_path.iterdir())
