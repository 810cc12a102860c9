"""Epochs that are whole before a restart, and leave samples out after it."""

from itertools import chain, count, islice

import numpy as np
import pytest

from rankscope.agent.assembly import summarize
from rankscope.bus.finding import Severity
from rankscope.evidence.samples.epochs import KEY, EpochsCutShort
from rankscope.record.states import pack_state, unpack_state
from support.stepping import evidence_of, words
from support.streams import gathered, sharded, with_replacement

W, BATCH = 2, 8
GLOBAL = W * BATCH


def epochs(size, first=0, begin=0, *, shuffled=True, every=False):
    """Yield batches of epochs of the rest from a step on: of the first epoch, or of ``every``."""
    for epoch in count(first):
        order = np.random.default_rng(epoch).permutation(size) if shuffled else np.arange(size)
        batches = order[: size // GLOBAL * GLOBAL].reshape(-1, W, BATCH)
        yield from batches[begin if every or epoch == first else 0 :]


def restarted(before, after, capacity=1 << 16, **options):
    old, new = (EpochsCutShort(capacity=capacity, **options) for _ in range(2))
    for number, samples in enumerate(before):
        assert evidence_of(old, summarize(gathered(number, list(samples)))) == []
    old.close()
    new.restore(unpack_state(pack_state(old.state())))
    steps = enumerate(after, len(before))
    return [e for n, batch in steps for e in evidence_of(new, summarize(gathered(n, list(batch))))]


@pytest.mark.parametrize(("size", "capacity"), [(80, 1 << 16), (1280, 300)])
@pytest.mark.parametrize("shuffled", [True, False])
def test_epochs_that_begin_at_the_place_of_the_restart_are_a_warning(size, capacity, shuffled):
    length = size // GLOBAL
    begin = 2 * length // 5
    stop = 4 * length + begin
    before = list(islice(epochs(size, shuffled=shuffled), stop))
    after = epochs(size, 4, begin, shuffled=shuffled, every=True)
    [found] = restarted(before, islice(after, 9 * length), capacity)
    assert (found.cause, found.key) == ("data.resume_mismatch", KEY)
    assert (found.severity, found.first_step) == (Severity.WARNING, stop)
    assert f"Before the restart at step {stop}" in words(found)
    assert found.numbers["samples"] == pytest.approx(size, rel=0.2)


def other_data(size):
    return epochs(size, 77), (batch + 10**6 for batch in epochs(size, 78))


HEALTHY = {
    "whole epochs": lambda: (epochs(80), epochs(80, 4, 2)),
    "with a rest that is left out": lambda: (epochs(95), epochs(95, 4, 2)),
    "epochs of one batch": lambda: (epochs(28), epochs(28, 22, 0)),
    "padded shards": lambda: (sharded(75, W, BATCH), islice(sharded(75, W, BATCH), 22, None)),
    "with replacement": lambda: (with_replacement(80, W, BATCH, 0),) * 2,
    "other data": lambda: other_data(80),
    "the last steps again": lambda: (epochs(80), islice(epochs(80), 18, None)),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_goes_on_as_before_is_silent(name):
    before, after = HEALTHY[name]()
    before = list(islice(before, 22))
    assert restarted(before, islice(after, 150)) == []


def test_a_few_epochs_before_the_restart_and_repeats_on_purpose_show_nothing():
    short = list(islice(epochs(80), 8))
    rest = list(islice(epochs(80, 1, 3, every=True), 60))
    assert restarted(short, rest) == []
    assert restarted(list(islice(epochs(80), 22)), rest, repeats=True) == []
    assert restarted(list(islice(epochs(80), 22)), chain(rest)) != []
