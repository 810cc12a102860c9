"""What can be watched at all, and what is refused in one sentence."""

import re

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import rankscope
from rankscope import Run
from rankscope.errors import UnsupportedError
from support.loops import train_watched
from support.models import make_model
from support.ranks import on_ranks

pytestmark = pytest.mark.ranks


def python_reducer() -> DistributedDataParallel:
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        return DistributedDataParallel(make_model())
    finally:
        torch._dynamo.config.optimize_ddp = True


def mixed_precision() -> DistributedDataParallel:
    return DistributedDataParallel(
        make_model(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16)
    )


def delayed_reduction() -> DistributedDataParallel:
    model = make_model()
    return DistributedDataParallel(
        model,
        delay_all_reduce_named_params=[("head.bias", model.head.bias)],
        param_to_hook_all_reduce=model.embedding.weight,
    )


def several_devices() -> DistributedDataParallel:
    ddp = DistributedDataParallel(make_model())
    ddp.module.head.bias = torch.nn.Parameter(torch.empty(50, device="meta"))
    return ddp


def of_fairscale() -> torch.nn.Module:
    """Stands for a wrapper of fairscale, which is not installed: it is known by its module."""
    kind = type("ShardedDataParallel", (torch.nn.Sequential,), {})
    kind.__module__ = "fairscale.nn.data_parallel.sharded_ddp"
    wrapper: torch.nn.Module = kind(make_model())
    return wrapper


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

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs):
        return self.inner(inputs)


def try_all(rank: int, folder: str) -> list[str]:
    """Watch what is refused, and then a wrapped model in a shell; return why it was refused."""
    problems = []
    for make in REFUSED.values():
        with pytest.raises(UnsupportedError) as caught:
            rankscope.watch(make(), run_dir=f"{folder}/refused")
        problems.append(str(caught.value))
    for name, wrap in {"DDP": DistributedDataParallel, "FSDP2": fully_shard}.items():
        torch.manual_seed(0)
        model = Shell(wrap(torch.nn.Linear(4, 2)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def loss_of(step: int, model: torch.nn.Module = model) -> torch.Tensor:
            torch.manual_seed(10 * step + rank)
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
