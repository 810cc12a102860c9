"""What one rank alone cannot do when the watch begins: all ranks hear of it at once."""

import io
import logging
import time

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope import Run
from rankscope.bus.evidence import Table
from rankscope.session.start import log_to_stderr
from rankscope.wrappers import rendezvous
from support.loops import Loop
from support.models import make_model
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks


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
    circular: dict = {}
    circular["itself"] = circular
    frozen = DistributedDataParallel(make_model())
    for parameter in list(frozen.parameters())[:2] if rank == 1 else []:
        parameter.requires_grad_(False)
    staged = DistributedDataParallel(make_model())
    for name, parameter in staged.module.named_parameters():
        parameter.requires_grad_(name.startswith("embedding") == (rank == 0))
    problems = {
        "long name": problem_of(ddp, f"{folder}/{'x' * 300}"),
        "config": problem_of(ddp, f"{folder}/config", config=circular),
        "no config": problem_of(ddp, f"{folder}/none", config=1 if rank == 1 else None),
        "webhook": problem_of(ddp, f"{folder}/webhook", sinks=["webhook:http://[::1"]),
        "tokenizer": problem_of(ddp, f"{folder}/t", tokenizer=NoTokenizer() if rank == 1 else {}),
        "usage": problem_of(ddp, f"{folder}/u", tokenizer=3 if rank == 1 else {}),
        "frozen": problem_of(frozen, f"{folder}/f"),
        "staged": problem_of(staged, f"{folder}/s"),
    }
    loop = Loop(rank, f"{folder}/run")
    loop.step(0)
    loop.close()
    return problems, loop.warnings


def test_every_rank_hears_what_one_cannot_do(tmp_path):
    (first, quiet), (second, quiet_too) = run_ranks(begin_badly, 2, str(tmp_path))
    assert first == second
    assert {name: kind for name, (kind, _) in first.items()} == {
        **dict.fromkeys(first, "RunError"),
        "webhook": first["webhook"][0] or "raised nothing",
        "config": "UsageError",
        "no config": "UsageError",
        "usage": "UsageError",
        "frozen": "UsageError",
        "staged": "UsageError",
    }
    assert "RecursionError" in first["config"][1]
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
    loop = Loop(rank, f"{folder}/run" if rank == 0 else None)
    for step in range(3):
        loop.step(step)
    loop.close()
    return loop.warnings


def test_a_rank_that_does_not_watch_holds_up_nobody_for_long(tmp_path):
    warnings, none = run_ranks(train_alone, 2, str(tmp_path))
    assert none == []
    assert len(warnings) == 1
    assert "training goes on" in warnings[0]
    assert "none came from worker 1 within 0.3 s" in warnings[0]
    assert not list(tmp_path.iterdir())
