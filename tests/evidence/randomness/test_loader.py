"""Random generators of data-loader workers, with real loaders and worker processes."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from rankscope.evidence.randomness.probe import LoaderMeter

NUM_WORKERS = 2

# Global generators are what is watched.
# ruff: noqa: NPY002


class Noise(Dataset):
    """Samples that draw from these generators in the process that loads them."""

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


def loader_of(*generators, num_workers=NUM_WORKERS, seed=0, **options):
    """Return a loader whose processes are seeded from ``seed``."""
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
        loader = loader_of(
            "python",
            "numpy",
            "torch",
            worker_init_fn=partial(seed_numpy, 3),
            multiprocessing_context=context,
            shuffle=True,
            num_workers=processes,
        )
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
