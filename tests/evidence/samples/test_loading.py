"""What loaders yield identifies samples where the training changes them before the model."""

import itertools
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from rankscope.evidence.samples.probe import SampleProbe
from rankscope.wrappers.samples import digest_inputs


def plainly(work, *args):
    work(*args)


@pytest.fixture(name="probe")
def make_probe():
    probe = SampleProbe(plainly)
    yield probe
    probe.close()


def data(rows=24, width=6):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0))


def taken(probe, inputs):
    probe.on_inputs((inputs,), {}, 0)
    [part] = probe._samples.collect()
    return part if isinstance(part, np.ndarray) else part.numpy()


def test_samples_with_noise_are_those_of_the_loader(probe):
    labels = torch.arange(24) % 3
    for _, batch in DataLoader(TensorDataset(labels, data()), batch_size=4):
        rows = digest_inputs((batch,), {}).tolist()
        assert taken(probe, batch + torch.randn(4, 6)).tolist() == rows


def test_samples_as_they_are_and_whole_numbers_are_those_of_the_model(probe):
    for (batch,) in DataLoader(TensorDataset(data()), batch_size=4):
        shown = batch[[1, 0, 3, 2]]
        assert taken(probe, shown).tolist() == digest_inputs((shown,), {}).tolist()
    for (batch,) in DataLoader(TensorDataset(torch.arange(24).view(12, 2)), batch_size=4):
        assert taken(probe, batch + 1).tolist() == digest_inputs((batch + 1,), {}).tolist()


def test_loaders_whose_batches_the_model_gets_as_they_are_are_followed_no_more(probe):
    for (batch,) in DataLoader(TensorDataset(data(40)), batch_size=4):
        taken(probe, batch)
    changed = torch.randn(4, 6)
    next(iter(DataLoader(TensorDataset(data()), batch_size=4)))
    assert taken(probe, changed).tolist() == digest_inputs((changed,), {}).tolist()


def test_a_loader_one_batch_ahead_and_another_for_evaluation(probe):
    ahead = iter(DataLoader(TensorDataset(data()), batch_size=4))
    other = DataLoader(TensorDataset(data() + 9), batch_size=4)
    rows = [digest_inputs((part,), {}).tolist() for part in data().split(4)]
    next(ahead)
    for number in range(4):
        next(ahead)
        assert taken(probe, torch.randn(4, 6)).tolist() == rows[number]
        if number == 1:
            assert len(list(other)) == 6  # no forward pass in training takes these


def test_batches_of_another_size_and_of_another_thread_are_left_alone(probe):
    loader = DataLoader(TensorDataset(data()), batch_size=4)
    halves = torch.randn(2, 6)
    next(iter(loader))
    assert taken(probe, halves).tolist() == digest_inputs((halves,), {}).tolist()
    thread = threading.Thread(target=lambda: next(iter(loader)))
    thread.start()
    thread.join()
    other = torch.randn(4, 6)
    assert taken(probe, other).tolist() == digest_inputs((other,), {}).tolist()


def fed(probe, batches):
    """Return after which of the steps that these batches feed their loader goes on."""
    found = []
    for batch in batches:
        if found:
            found[-1] = probe._rows.end_step()
        taken(probe, batch)
        found.append(None)
    return [*found[:-1], probe._rows.end_step()]


def ahead(batches):
    """Yield batches as accelerate does: the next one is read first."""
    batches = iter(batches)
    current = next(batches)
    for following in batches:
        yield current
        current = following
    yield current


def test_the_end_of_the_loader_that_feeds_the_step_is_seen(probe):
    loader = DataLoader(data(), batch_size=4)
    assert fed(probe, loader) == [True] * 5 + [False]
    assert fed(probe, itertools.islice(loader, 4)) == [True] * 4
    assert fed(probe, ahead(loader))[-1] is False
    evaluated = iter(DataLoader(data(), batch_size=4))
    next(evaluated)
    assert fed(probe, [data(), data()]) == [True, False]  # it yields nothing for the second one
    assert fed(probe, map(next, [iter(loader)] * 6))[-2:] == [True, False]  # its length is known
    taken(probe, next(evaluated))
    assert len(list(loader)) == 6  # an evaluation after the step
    assert probe._rows.end_step()


class Lines(IterableDataset):
    """A stream that knows its length, or does not."""

    def __init__(self, rows, length):
        self.rows = rows
        self.length = length

    def __iter__(self):
        return iter(self.rows)

    def __len__(self):
        if self.length is None:
            raise TypeError
        return self.length


@pytest.mark.parametrize(("length", "goes_on"), [(24, False), (None, True)])
def test_a_stream_ends_where_its_loader_has_said(probe, length, goes_on):
    loader = DataLoader(Lines(data(), length), batch_size=4)
    if length is not None:
        assert len(loader) == 6  # the training may count up to it
    assert fed(probe, map(next, [iter(loader)] * 6))[-1] is goes_on
    assert fed(probe, loader)[-1] is False


class Stream(IterableDataset):
    """All rows in each process of the loader, or each in one of them."""

    def __init__(self, shares):
        self.shares = shares

    def __iter__(self):
        process = get_worker_info()
        rows = data()
        return iter(rows[process.id :: process.num_workers] if self.shares else rows)


@pytest.mark.parametrize("shares", [False, True])
def test_processes_that_yield_the_same_batches_are_counted(probe, shares):
    again = []
    for batch in DataLoader(Stream(shares), batch_size=4, num_workers=2):
        taken(probe, batch)
        again.append(probe._rows.collect())
    assert again == ([0] * 6 if shares else [0, 1] * 6)


def test_a_loader_without_processes_has_no_count_and_the_end_leaves_torch_alone():
    before = DataLoader.__iter__, type(iter(DataLoader(data()))).__next__
    probe = SampleProbe(plainly)
    assert type(iter(DataLoader(data()))).__next__ is not before[1]
    list(DataLoader(TensorDataset(data()), batch_size=4))
    assert probe._rows.collect() is None
    probe.close()
    assert (DataLoader.__iter__, type(iter(DataLoader(data()))).__next__) == before
