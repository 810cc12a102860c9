import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torch.utils.data._utils.signal_handling import _remove_worker_pids

from rankscope.evidence.randomness.probe import (
    BETWEEN_BITS,
    NUMPY,
    PYTHON,
    TORCH,
    LoaderMeter,
    PrivateRandomMeter,
    RandomMeter,
)
from rankscope.gradients.fingerprint import torch_state
from rankscope.stats.arrays import digest_of

CPU = torch.device("cpu")

DIGESTS = {PYTHON: "rng_digest_python", NUMPY: "rng_digest_numpy", TORCH: "rng_digest"}
DRAWS = {
    PYTHON: lambda: random.getrandbits(96),
    NUMPY: lambda: np.random.random(2),
    TORCH: lambda: torch.rand(1),
}


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def meter_of(*passes, meter=None):
    meter = meter or RandomMeter(CPU)
    for draw in passes:
        meter.before_forward()
        draw()
        meter.after_forward()
    return meter.collect()


def nothing():
    pass


@pytest.mark.parametrize("bit", DRAWS)
def test_what_moves_from_one_step_to_the_next_is_told_apart(bit):
    seed_all(1)
    meter = RandomMeter(CPU)
    assert meter_of(nothing, meter=meter) == {"rng_used": 0}
    DRAWS[bit]()
    collected = meter_of(nothing, meter=meter)
    assert set(collected) == {"rng_used", DIGESTS[bit]}
    assert collected["rng_used"] == 16 * bit
    assert meter_of(nothing, meter=meter) == {"rng_used": 0}


def completions(meter, *, first=nothing):
    first()
    for _ in range(3):
        meter.before_apart()
        torch.rand(2)


@pytest.mark.parametrize(
    ("draw", "bit"),
    [
        (lambda _: random.random(), 0),
        (lambda _: np.random.random(), 0),
        (lambda _: [random.random() for _ in range(624)], PYTHON),
        (completions, 0),
        (partial(completions, first=DRAWS[TORCH]), TORCH),
        (lambda meter: [meter.before_apart(), torch.rand(2)], TORCH),
    ],
)
def test_one_number_for_a_step_and_completions_may_be_drawn_alike(draw, bit):
    seed_all(1)
    meter = RandomMeter(CPU)
    meter_of(nothing, meter=meter)
    found = []
    for _ in range(400):  # through several keys of a twister
        draw(meter)
        found.append(meter_of(nothing, meter=meter)["rng_used"] >> BETWEEN_BITS)
    assert set(found) == {bit}


@pytest.mark.parametrize("bit", DRAWS)
def test_the_generator_that_moves_is_named_and_has_equal_digests_from_equal_starts(bit):
    digests = []
    for seed in (1, 1, 2):
        seed_all(seed)
        collected = meter_of(DRAWS[bit])
        assert collected.keys() == {"rng_used", DIGESTS[bit]}
        assert collected["rng_used"] == bit
        digests.append(collected[DIGESTS[bit]])
    assert digests[0] == digests[1] != digests[2]
    assert all(0 <= digest < 2**63 for digest in digests)


def test_a_draw_that_changes_the_end_of_torchs_state_alone_is_seen():
    """The second of two normal numbers, which had been put aside."""
    torch.manual_seed(0)
    torch.randn(1)
    before, words_before = torch_state(), torch.get_rng_state()
    torch.randn(1)
    assert (torch.get_rng_state() != words_before).nonzero().min() > len(words_before) - 64
    assert torch_state() != before


def test_an_accelerator_whose_state_cannot_be_told_is_left_out(monkeypatch):
    def refuse(device):
        raise RuntimeError("capturing a graph")

    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(get_rng_state=refuse))
    assert meter_of(nothing, meter=RandomMeter(torch.device("cuda"))) == {"rng_used": 0}


def test_digests_are_the_same_in_every_process_and_release():
    assert digest_of(b"rankscope") == 8924695359294887236


def of_torch(seed):
    return torch.Generator().manual_seed(seed)


MAKERS = {
    "torch": (of_torch, lambda g: torch.rand(1, generator=g)),
    "numpy": (np.random.default_rng, lambda g: g.random()),
    "numpy, legacy": (np.random.RandomState, lambda g: g.random_sample()),
    "Python": (random.Random, lambda g: g.random()),
}


class Transform:
    def __init__(self, generator):
        self.generator = generator


class Data:
    def __init__(self, generator):
        self.transforms = [Transform(generator)]
        self.sampler = RandomSampler(range(4), generator=torch.Generator().manual_seed(0))

    @property
    def costly(self):
        raise AssertionError("no property of the data set's may run")


def digests(seed, kind, held_by_module):
    make, draw = MAKERS[kind]
    generator = make(seed)
    module, data = nn.Linear(2, 2), None
    if held_by_module:
        module.noise = generator
    else:
        data = Data(generator)
    meter = PrivateRandomMeter(module, SimpleNamespace(dataset=data))
    seen = []
    for step in range(4):
        meter.before_forward()
        seen.append(meter.collect())
        if data is not None:
            list(data.sampler)  # ought to be alike on all ranks
        if step != 2:
            draw(generator)
    return seen


@pytest.mark.parametrize(
    ("kind", "held_by_module"),
    [("torch", True), ("numpy", False), ("numpy, legacy", True), ("Python", False)],
)
def test_generators_that_move_have_a_digest_of_where_they_stand(kind, held_by_module):
    one = digests(1, kind, held_by_module)
    assert [set(values) for values in one] == [set(), {"rng_private"}, {"rng_private"}, set()]
    assert digests(1, kind, held_by_module) == one
    other = digests(2, kind, held_by_module)
    assert all(a != b for a, b in zip(one[1:3], other[1:3], strict=True))


# Global generators are what is watched.
# ruff: noqa: NPY002


class Noise(Dataset):
    def __init__(self, *generators):
        self.generators = generators

    def __len__(self):
        return 8

    def __getitem__(self, index):
        drawn = {
            "python": random.random,
            "numpy": lambda: float(np.random.random()),
            "torch": lambda: float(torch.rand(1)),
        }
        return torch.tensor([index, *(drawn[name]() for name in self.generators)], dtype=float)


def seed_numpy(seed, worker_id):
    np.random.seed(seed)


def seed_numpy_by_worker(worker_id):
    np.random.seed(worker_id)


def loader_of(*generators, num_workers=2, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(
        Noise(*generators), batch_size=2, num_workers=num_workers, generator=generator, **options
    )


def epoch(loader):
    return torch.cat(list(loader)).tolist()


def collected_after_an_epoch(loader):
    meter = LoaderMeter(loader)
    epoch(loader)
    return meter.collect()


@pytest.mark.parametrize("name", ["python", "torch"])
def test_only_generators_that_the_workers_use_are_told(name):
    collected = collected_after_an_epoch(loader_of(name))
    assert set(collected) == {f"loader_rng_{name}", "loader_rng_repeats"}
    assert collected["loader_rng_repeats"] == 0
    assert 0 <= collected[f"loader_rng_{name}"] < 2**63


def test_a_constant_seed_makes_the_workers_of_a_rank_alike():
    loader = loader_of("numpy", "torch", worker_init_fn=partial(seed_numpy, 0))
    assert collected_after_an_epoch(loader)["loader_rng_repeats"] == 2


@pytest.mark.parametrize(
    ("context", "processes"), [("fork", 2), pytest.param("spawn", 1, marks=pytest.mark.slow)]
)
def test_batches_are_the_same_as_without_the_meter(context, processes):
    def batches(context, *, watch):
        torch.manual_seed(5)
        options = {"multiprocessing_context": context, "num_workers": processes, "shuffle": True}
        init = partial(seed_numpy, 3)
        loader = loader_of("python", "numpy", "torch", worker_init_fn=init, **options)
        meter = LoaderMeter(loader) if watch else None
        return epoch(loader), torch.rand(1).item(), meter and meter.collect()

    alone, drawn, _ = batches("fork", watch=False)
    watched, drawn_watched, collected = batches(context, watch=True)
    assert (watched, drawn_watched) == (alone, drawn)
    assert collected["loader_rng_repeats"] == (2 if processes > 1 else 0)  # numpy's alone
    assert len(collected) == 4


def test_workers_that_live_on_tell_while_they_live():
    loader = loader_of("numpy", persistent_workers=True)
    meter = LoaderMeter(loader)
    collected = {}
    for _ in range(200):  # until the processes have looked for a second time
        epoch(loader)
        collected = meter.collect()
        if collected:
            break
    assert sorted(collected) == ["loader_rng_numpy", "loader_rng_repeats"]
    loader._iterator._shutdown_workers()


def test_removing_gives_the_loader_its_own_function_back():
    loader = loader_of("numpy", worker_init_fn=seed_numpy_by_worker)
    meter = LoaderMeter(loader)
    assert loader.worker_init_fn is not seed_numpy_by_worker
    meter.remove()
    assert loader.worker_init_fn is seed_numpy_by_worker


def fail(worker_id):
    raise ValueError("the user's own error")


def test_an_error_of_the_loaders_own_function_arrives_as_before():
    loader = loader_of("numpy", worker_init_fn=fail)
    LoaderMeter(loader)
    batches = iter(loader)
    with pytest.raises(ValueError, match="the user's own error"):
        next(batches)
    _remove_worker_pids(id(batches))  # or torch raises when it learns of an end
    batches._worker_pids_set = False
    for process in batches._workers:  # or torch waits five seconds for each
        process.terminate()


def test_a_failure_of_ours_does_not_end_a_worker(monkeypatch):
    def refuse(row):
        raise OSError("no more threads")

    monkeypatch.setattr("rankscope.evidence.randomness.probe._MoveWatcher", refuse)
    loader = loader_of("numpy", multiprocessing_context="fork")
    meter = LoaderMeter(loader)
    assert len(epoch(loader)) == 8
    assert meter.collect() == {}
