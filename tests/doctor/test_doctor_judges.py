"""What is made of the facts of all ranks."""

import pytest

from rankscope.tools.doctor import Status, collectives, model, topology


def one(results, name):
    [result] = [result for result in results if result.name == name]
    return result


# Topology


def worker(**changes):
    usual = {
        "host": "a",
        "launched": True,
        "world_size": 4,
        "device": "cpu",
        "device_kind": "cpu",
        "device_name": "CPU",
        "device_id": "",
        "devices": 0,
        "tasks": None,
    }
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
        (
            [worker()] * 3 + [worker(host="b")],
            Status.WARNING,
            "hosts have different numbers of ranks, b only 1",
        ),
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
    ("strange", "status", "ranks"),
    [
        (case(), Status.OK, ()),
        (case(wrong=1), Status.ERROR, (1,)),
        (case(digest="y"), Status.ERROR, (1,)),
    ],
)
def test_collectives(strange, status, ranks):
    usual = {"cases": [{**case(), "same": strange["same"]}], "unsupported": ["all-gather fp16"]}
    [result] = collectives.STAGE.judge([usual, {**usual, "cases": [strange]}, usual])
    assert (result.status, result.ranks) == (status, ranks)
    words = {Status.OK: "not supported here: all-gather fp16", Status.ERROR: "rank 1, all-reduce"}
    assert words[status] in result.found


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
    results = collectives.SPEED_STAGE.judge(
        [timing(), timing(0.031), timing(0.06, load=9.0), timing()]
    )
    slow = one(results, "stragglers")
    assert (slow.status, slow.ranks) == (Status.NOTE, (2,))
    assert "rank 2 2.0 ×; load 9.0 on 2 cores at rank 2" in slow.found
    bandwidth = one(results, "bandwidth")
    assert bandwidth.numbers["25 MB"]["bytes_per_second"] == pytest.approx(25e9)
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
