import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from rankscope.tools.doctor import Status, collectives, determinism, loader, model, topology
from rankscope.tools.doctor.loader import look
from rankscope.tools.doctor.stage import Bench, Options

sys.path.insert(0, str(Path(__file__).parent))
import patients


def one(results, name):
    [result] = [result for result in results if result.name == name]
    return result


# Topology


def worker(**changes):
    device = {"device": "cpu", "device_kind": "cpu", "device_name": "CPU", "device_id": ""}
    usual = {"host": "a", "launched": True, "world_size": 4, "devices": 0, "tasks": None, **device}
    return {**usual, **changes}


def gpus(ids, **changes):
    kind = {"device_kind": "cuda", "device_name": "X", "devices": 4, **changes}
    return [worker(device=f"cuda:{i}", device_id=f"gpu-{i}", **kind) for i in ids]


@pytest.mark.parametrize(
    ("facts", "status", "words"),
    [
        (gpus([0, 1, 2, 3]), Status.OK, "4 ranks on a, X"),
        (gpus([0, 1, 1, 3]), Status.ERROR, "ranks 1 and 2 share one device (cuda:1 of a)"),
        ([*gpus([0, 1, 2]), worker()], Status.ERROR, "different kinds of device: cpu and cuda"),
        ([worker()] * 3 + [worker(host="b")], Status.WARNING, "numbers of ranks, b only 1"),
        ([*[worker()] * 3, worker(world_size=8)], Status.ERROR, "disagree on WORLD_SIZE: [4, 8]"),
    ],
)
def test_topology(facts, status, words):
    [result] = topology.STAGE.judge(facts)
    assert result.status is status
    assert words in result.found
    assert bool(result.advice) == (status is not Status.OK)


# Environment


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"LOCAL_RANK": "2", "CUDA_VISIBLE_DEVICES": "2"}, Status.OK, "alike"),
        ({"torch": "2.12"}, Status.WARNING, "torch 2.12 on rank 2"),
        ({"OMP_NUM_THREADS": "8"}, Status.NOTE, "OMP_NUM_THREADS"),
    ],
)
def test_environment(changes, status, words):
    usual = {"torch": "2.13", "python": "3.11", "LOCAL_RANK": "0", "revision": "cafe"}
    [result] = topology.ENVIRONMENT_STAGE.judge([usual, usual, {**usual, **changes}, usual])
    assert result.status is status
    assert words in result.found
    assert result.ranks == (() if status is Status.OK else (2,))


# Collectives and sums


def case(wrong=0, digest="x", same=True):
    example = "1 of 9 numbers wrong, number 4 is 3 and not 2" if wrong else ""
    name = "all-reduce fp32 of 9"
    return {"name": name, "wrong": wrong, "example": example, "digest": digest, "same": same}


@pytest.mark.parametrize(
    ("strange", "status", "ranks", "words"),
    [
        (case(), Status.OK, (), "not supported here: all-gather fp16"),
        (case(wrong=1), Status.ERROR, (1,), "rank 1, all-reduce"),
        (case(digest="y"), Status.ERROR, (1,), "rank 1, all-reduce"),
    ],
)
def test_collectives(strange, status, ranks, words):
    usual = {"cases": [{**case(), "same": strange["same"]}], "unsupported": ["all-gather fp16"]}
    [result] = collectives.STAGE.judge([usual, {**usual, "cases": [strange]}, usual])
    assert (result.status, result.ranks) == (status, ranks)
    assert words in result.found


def sums(digests="aaaaaaaaaa", error=1e-9):
    return {name: {"digests": list(digests), "error": error} for name in ("fp32", "bf16")}


@pytest.mark.parametrize(
    ("facts", "status", "ranks"),
    [
        ([sums()] * 3, Status.OK, ()),
        ([sums("aaaabaaaaa")] * 3, Status.WARNING, ()),
        ([sums(), sums(), sums("bbbbbbbbbb")], Status.ERROR, (2,)),
        ([sums(error=float("nan"))] * 3, Status.ERROR, ()),
    ],
)
def test_repeated_sums(facts, status, ranks):
    [result] = collectives.REPEATED_STAGE.judge(facts)
    assert (result.status, result.ranks) == (status, ranks)


def timing(compute=0.03, load=1.0):
    latency = dict.fromkeys(collectives.AMOUNTS, 1e-3)
    return {"latency": latency, "compute": compute, "waiting": 0.0, "load": load, "cores": 2}


def test_slow_ranks_are_named_with_the_load_of_their_host():
    results = collectives.SPEED_STAGE.judge([timing(), timing(), timing(0.06, load=9.0), timing()])
    slow = one(results, "stragglers")
    assert (slow.status, slow.ranks) == (Status.NOTE, (2,))
    assert "rank 2 2.0 ×; load 9.0 on 2 cores at rank 2" in slow.found
    assert one(results, "bandwidth").numbers["25 MB"]["bytes_per_second"] == pytest.approx(25e9)
    assert one(collectives.SPEED_STAGE.judge([timing()] * 4), "stragglers").status is Status.OK


# Model


def built(weight=1, bias=1, state=1, **changes):
    usual = {
        "rng": {"Python": 1, "numpy": 1, "torch": 1},
        "parameters": {"weight": [[2, 2], "float32", weight], "bias": [[2], "float32", bias]},
        "buffers": {},
        "wrapped": False,
        "dropout": [],
        "batch_norms": [],
        "optimizer": {
            "settings": {"class": "Adam", "group 0: lr": 0.1},
            "state": {"0 exp_avg": [[2], "float32", state]},
        },
    }
    return {**usual, **changes}


@pytest.mark.parametrize(
    ("facts", "name", "status", "ranks"),
    [
        ([built()] * 3, "parameters", Status.OK, ()),
        ([built(), built(bias=2), built()], "parameters", Status.ERROR, (1,)),
        ([built(r, wrapped=True) for r in range(3)], "parameters", Status.ERROR, (0, 1, 2)),
        ([built(None, None)] * 3, "parameters", Status.SKIPPED, ()),
        ([built(), built(state=2), built()], "optimizer", Status.ERROR, (1,)),
        ([built()] * 3, "random_numbers", Status.OK, ()),
        ([built(dropout=["drop"])] * 3, "random_numbers", Status.NOTE, (0, 1, 2)),
        (
            [built(dropout=["drop"], rng={"torch": rank // 2}) for rank in range(3)],
            "random_numbers",
            Status.NOTE,
            (0, 1),
        ),
    ],
)
def test_models(facts, name, status, ranks):
    result = one(model.STAGE.judge(facts), name)
    assert (result.status, result.ranks) == (status, ranks)


# Batches that all ranks have read


def read(samples, **changes):
    usual = {
        "samples": samples,
        "recognised": True,
        "kind": "",
        "tokens": [10] * len(samples),
        "ended": True,
        "length": None,
        "set_epoch": "",
        "one_pass": False,
        "changes_alone": True,
        "changes_after_set_epoch": None,
        "sampler": {"class": ""},
        "with_replacement": False,
    }
    return {**usual, **changes}


def dealt(order, num_ranks, batch=4):
    return [
        [list(map(int, shard[at : at + batch])) for at in range(0, len(shard), batch)]
        for shard in [order[rank::num_ranks] for rank in range(num_ranks)]
    ]


def judged(samples, **changes):
    return one(loader.STAGE.judge([read(batches, **changes) for batches in samples]), "shards")


def test_padding_at_the_end_is_a_note():
    samples = dealt(np.r_[np.arange(398), [0, 1]], 4)
    result = judged(samples)
    assert result.status is Status.NOTE
    assert result.numbers["padding"] == 2
    assert judged(samples, ended=False).status is Status.OK  # too few to prove anything


def test_shuffles_that_differ_overlap():
    samples = [dealt(np.random.default_rng(rank).permutation(400), 4)[rank] for rank in range(4)]
    result = judged(samples, ended=False)
    assert result.status is Status.ERROR
    assert "draw each other's samples" in result.found


def test_whole_shards_drawn_with_replacement_are_no_overlap_where_the_loaders_say_so():
    drawn = [[7, 3, 12], [9, 7, 1], [5, 12, 20], [14, 2, 8]]  # shards, by rank: 7 and 12 again
    samples = [[list(range(40 * s, 40 * s + 40)) for s in shards] for shards in drawn]
    assert judged(samples, ended=False).status is Status.ERROR
    result = judged(samples, ended=False, with_replacement=True)
    assert result.status is Status.OK
    assert "with replacement" in result.found


LIKE_EACH_EPOCH = {"changes_alone": False}
WITH_SET_EPOCH = {**LIKE_EACH_EPOCH, "set_epoch": "s.set_epoch", "changes_after_set_epoch": True}


@pytest.mark.parametrize(
    ("name", "changes", "status", "words"),
    [
        ("batch_counts", [{}, {}], Status.OK, "2 batches on each rank"),
        ("batch_counts", [{"length": 9}, {"length": 8}], Status.ERROR, "1 has 8 batches, others"),
        ("batch_counts", [{}, {"tokens": [1] * 5}], Status.ERROR, "0 has 2 batches, others up to"),
        ("loss_weighting", [[100, 90], [95, 95]], Status.OK, "190 label tokens or more"),
        ("loss_weighting", [[100, 50], [50, 100]], Status.NOTE, "× 2 typically"),
        ("loss_weighting", [[100, 100], [1, 1]], Status.WARNING, "1 has 2 in all, others up to 2"),
        ("epoch_order", [{}, {}], Status.OK, ""),
        ("epoch_order", [{"one_pass": True}] * 2, Status.OK, ""),
        ("epoch_order", [LIKE_EACH_EPOCH] * 2, Status.WARNING, ""),
        ("epoch_order", [WITH_SET_EPOCH] * 2, Status.NOTE, "s.set_epoch"),
    ],
)
def test_batches_of_all_ranks_are_compared(name, changes, status, words):
    own = [each if isinstance(each, dict) else {"tokens": each} for each in changes]
    facts = [read([[rank, rank + 10]] * 2, **each) for rank, each in enumerate(own)]
    result = one(loader.STAGE.judge(facts), name)
    assert result.status is status
    assert words in result.found


def looked_at(batches):
    options, place = SimpleNamespace(batches=100, seconds=60.0), SimpleNamespace(num_ranks=2)
    functions = {"loader": lambda: batches}
    bench = SimpleNamespace(functions=functions, options=options, place=place, batch=None)
    return look(bench)


@pytest.mark.parametrize("batch_size", [1, 8])
def test_samples_that_look_alike_are_not_judged(batch_size):
    generator = torch.Generator().manual_seed(0)
    rare = [(torch.rand(100, batch_size, generator=generator) < 0.03).long() for _ in range(2)]
    results = loader.STAGE.judge([looked_at(list(labels)) for labels in rare])
    shards, order = one(results, "shards"), one(results, "epoch_order")
    assert [shards.status, order.status] == [Status.SKIPPED] * 2
    assert f"a Tensor with 2 different samples of {100 * batch_size}" in shards.found


def examine(model, batch=None, seconds=60.0):
    if batch is None:
        batch = next(iter(DataLoader(patients.Numbers(), batch_size=4)))
    options = Options(seconds=seconds)
    bench = Bench(None, options, None, torch.device("cpu"), model=model, batch=batch)
    facts = determinism.look(bench)
    [result] = determinism.STAGE.judge([facts])
    return result, facts


def test_a_step_that_repeats_is_well():
    result, facts = examine(patients.repeats())
    assert result.status is Status.OK, result
    assert facts["different"] == 1
    assert facts["runs"] == determinism.RUNS
    assert facts["operators_repeated"] > 20
    assert facts["operators"] == {}
    assert facts["cost"] > 0


def test_a_flag_that_helps_is_named_with_its_cost():
    result, facts = examine(patients.fixable())
    assert result.status is Status.WARNING
    assert facts["fixed"]
    assert "use_deterministic_algorithms(True) gives the same bits" in result.advice
    assert "times as long" in result.advice


def test_nothing_is_changed():
    model = patients.any_order()
    model(**next(iter(DataLoader(patients.Numbers(), batch_size=4))))["loss"].backward()

    def state():
        tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
        flags = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
            torch.is_warn_always_enabled(),
        )
        return [t.clone() for t in tensors], torch.get_rng_state(), np.random.get_state(), flags  # noqa: NPY002

    batch = next(iter(DataLoader(patients.Numbers(), batch_size=4)))
    before = state()
    examine(model, batch)
    after = state()
    assert all(map(torch.equal, before[0], after[0]))
    assert torch.equal(before[1], after[1])
    assert (before[2][1] == after[2][1]).all()
    assert before[3] == after[3]
