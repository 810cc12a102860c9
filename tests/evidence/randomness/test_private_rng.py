"""Private random generators: which are found, and what tells that they are alike."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import RandomSampler

from rankscope.evidence.randomness.probe import PrivateRandomMeter


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
    """A data set whose list of transforms holds the generator."""

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
