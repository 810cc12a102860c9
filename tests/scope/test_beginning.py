"""What one rank alone cannot do when the watch begins: all ranks hear of it at once."""

import pytest
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope import Run
from rankscope.core.signals import Table
from support.loops import Loop
from support.models import make_model
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks


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
    problems = {
        "long name": problem_of(ddp, f"{folder}/{'x' * 300}"),
        "config": problem_of(ddp, f"{folder}/config", config=circular),
        "no config": problem_of(ddp, f"{folder}/none", config=1 if rank == 1 else None),
        "webhook": problem_of(ddp, f"{folder}/webhook", sinks=["webhook:http://[::1"]),
        "tokenizer": problem_of(ddp, f"{folder}/t", tokenizer=NoTokenizer() if rank == 1 else {}),
        "usage": problem_of(ddp, f"{folder}/u", tokenizer=3 if rank == 1 else {}),
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
        "usage": "UsageError",
    }
    assert "RecursionError" in first["config"][1]
    assert "rank 1 cannot begin to watch (LookupError: no vocabulary" in first["tokenizer"][1]
    assert "rank 1 cannot begin to watch (TypeError" in first["no config"][1]
    assert "expected a tokenizer" in first["usage"][1]
    assert [quiet, quiet_too] == [[], []]
    assert Run.open(tmp_path / "run").table(Table.STEPS).num_rows == 1
