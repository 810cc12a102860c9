"""What a run says of its training, by name."""

import json
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from rankscope.files import to_plain
from rankscope.wrappers.facts import training_facts
from rankscope.wrappers.optimizers import JointOptimizer
from support.ranks import run_ranks


def make_model(width=3, dtype=torch.float32):
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width)).to(dtype)
    model[0].bias.requires_grad_(False)
    return model


def facts_of(model=None, optimizer=None, loader=None, wrapper=None, group=None):
    model = make_model() if model is None else model
    facts = training_facts(wrapper or model, model, optimizer, loader, group)
    assert json.loads(json.dumps(to_plain(facts))) == to_plain(facts)
    return facts


def test_parameters_are_counted_and_their_layout_has_a_digest():
    facts = facts_of()["parameters"]
    assert facts["tensors"] == 4
    assert facts["elements"] == 4 * 3 + 3 + 3 + 3
    assert (facts["trained_tensors"], facts["trained_elements"]) == (3, 4 * 3 + 3 + 3)
    assert facts["types"] == {"float32": 4}
    assert facts_of()["parameters"] == facts
    others = [make_model(4), make_model(dtype=torch.bfloat16), make_model().requires_grad_()]
    for other in (*others, nn.Sequential(make_model())):
        assert facts_of(other)["parameters"]["layout"] != facts["layout"]


def test_every_setting_of_the_optimizer_has_its_name():
    model = make_model()
    groups = [{"params": [model[0].weight], "lr": torch.tensor(0.5)}, {"params": model[1].weight}]
    groups[0]["max_norm"] = math.inf
    optimizer = torch.optim.AdamW(groups, lr=0.25, betas=(0.8, 0.99), weight_decay=0.125)
    facts = facts_of(model, optimizer)["optimizer"]
    first, second = facts["groups"]
    assert (facts["class"], facts["num_groups"]) == ("torch.optim.adamw.AdamW", 2)
    assert (first["lr"], second["lr"]) == (0.5, 0.25)
    assert (second["betas"], second["weight_decay"], second["tensors"]) == ([0.8, 0.99], 0.125, 1)
    assert (first["max_norm"], "params" in second) == ("inf", False)


def test_parameters_that_an_optimizer_inside_of_another_repeats_count_once():
    model = make_model()
    outer = torch.optim.SGD(model.parameters(), lr=0.1)
    inner = torch.optim.SGD([model[0].weight], lr=0.1)  # as ZeroRedundancyOptimizer has one
    facts = facts_of(model, JointOptimizer([outer, inner]))["optimizer"]
    assert [group["tensors"] for group in facts["groups"]] == [4]


class Odd:
    """Refuses whatever it is asked."""

    def __len__(self):
        raise RuntimeError("no")

    def __getattr__(self, name):
        raise RuntimeError("no")


def test_what_cannot_be_told_is_left_out():
    facts = facts_of(optimizer=Odd(), loader=Odd())
    assert facts["optimizer"] == {}
    assert facts["loader"] == {"class": f"{__name__}.Odd"}
    assert facts_of()["optimizer"] is None
    assert facts_of()["seed"] == torch.initial_seed()


def hooks(rank):
    found = []
    for register in (
        lambda ddp: None,
        lambda ddp: ddp.register_comm_hook(None, sum_up),
        lambda ddp: ddp.register_comm_hook(None, bf16_compress_hook),
        lambda ddp: ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS),
    ):
        ddp = DistributedDataParallel(make_model(), bucket_cap_mb=2)
        try:
            register(ddp)
        except (TypeError, RuntimeError):  # bfloat16 is refused on some machines
            continue
        found.append(facts_of(ddp.module, wrapper=ddp, group=ddp.process_group)["reduction"])
    return found


def sum_up(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@pytest.mark.ranks
def test_the_reduction_names_its_hook():
    [found] = run_ranks(hooks, 1)
    first, second, *_ = found
    assert first == {
        "class": "DistributedDataParallel",
        "backend": "gloo",
        "gradient_as_bucket_view": False,
        "find_unused_parameters": False,
        "static_graph": False,
        "bucket_bytes": 2 * 2**20,
        "hook": None,
    }
    assert second["hook"].endswith("sum_up")
    assert "fp16" in found[-1]["hook"].lower()
