import gc
import itertools
import threading
import weakref
from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    get_worker_info,
)

from rankscope import Run
from rankscope.bus.messages import Layout
from rankscope.evidence.samples.judge import Samples
from rankscope.evidence.samples.probe import SampleProbe
from rankscope.stats.arrays import MISSING_INT, Ragged
from rankscope.wrappers.datasets import digests_by_field, rows_digest
from rankscope.wrappers.samples import digest_inputs
from support.findings import told
from support.loops import watch
from support.ranks import run_ranks


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
    for _, batch in DataLoader(TensorDataset(torch.arange(24) % 3, data()), batch_size=4):
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


ROWS = 64


class Pictures(Dataset):
    """Rows of a table, each with noise of its own each time."""

    def __init__(self, rows=ROWS, seed=0):
        self.pictures = torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, place):
        return self.pictures[place] + torch.randn(6)


class Named(Dataset):
    def __init__(self, paths):
        self.samples = [(path, number % 2) for number, path in enumerate(paths)]

    def __len__(self):
        return len(self.samples)


class Made(Dataset):
    """Nothing but labels is stored; a row is made anew each time."""

    labels = None

    def __init__(self):
        self.labels = [number % 3 for number in range(ROWS)]

    def __len__(self):
        return ROWS


PATHS = [f"images/{number}.png" for number in range(ROWS)]


def frame():
    pandas = pytest.importorskip("pandas")
    data = Made()
    data.frame = pandas.DataFrame({"path": PATHS, "label": [0] * ROWS})
    return data


def test_ranks_that_share_one_field_have_the_same_rows():
    def with_more(data, **values):
        vars(data).update(values, noise=torch.randn(ROWS))
        return data

    mixed = PATHS[::-1]
    of_rank = with_more(Named([f"/local/1/{path}" for path in PATHS]))
    shared = [of_rank, with_more(Made(), inner=Named(PATHS)), Named(PATHS)]
    others = [Named(mixed), with_more(Made(), inner=Named(mixed))]
    known = [set(digests_by_field(each)) for each in shared]
    assert set.intersection(*known)
    assert all(set.union(*known).isdisjoint(digests_by_field(each)) for each in others)
    assert not any(map(digests_by_field, [Made(), Subset(Pictures(), range(9)), None]))


@pytest.mark.parametrize(
    "make",
    [
        Pictures,
        lambda: Named(PATHS),
        lambda: TensorDataset(torch.arange(ROWS), torch.zeros(ROWS)),
        lambda: Subset(Pictures(), range(8, 16)),
        lambda: ConcatDataset([Pictures(), Named(PATHS)]),
        lambda: [{"path": path} for path in PATHS],
        lambda: [np.arange(9) + number for number in range(ROWS)],
        frame,
    ],
)
def test_stored_rows_have_a_digest_that_another_copy_shares(make):
    assert rows_digest(make()) == rows_digest(make()) is not None


def test_a_table_of_datasets_has_one():
    from datasets import Dataset as Table

    table = Table.from_dict({"text": PATHS})
    assert rows_digest(table) == rows_digest(Table.from_dict({"text": PATHS})) is not None
    assert rows_digest(table.shuffle(seed=1)) != rows_digest(table)


def test_other_rows_another_order_and_fewer_rows_have_others():
    data = Pictures()
    order = list(range(ROWS))
    found = [Pictures(seed=1), Subset(data, order[::-1]), Subset(data, order[:9]), Pictures(63)]
    digests = {rows_digest(each) for each in [data, Named(PATHS), Named(PATHS[::-1]), *found]}
    assert len(digests) == 7
    assert None not in digests


@pytest.mark.parametrize("data", [Made(), [object()] * 9, iter([]), Subset(Made(), [1])])
def test_what_is_made_anew_or_has_no_content_has_none(data):
    assert rows_digest(data) is None


def places_fed(probe, batches):
    found = []
    for batch in batches:
        probe.on_inputs((batch + 1,), {}, 0)
        places = probe._samples.places()
        seen = probe._samples.collect()
        found.append([] if not seen else None if places is None else places[0].tolist())
    return found


@pytest.mark.parametrize("processes", [0, 2])
def test_a_loader_s_places_are_those_of_its_sampler(probe, processes):
    order = RandomSampler(range(ROWS), generator=torch.Generator().manual_seed(3))
    expected = list(RandomSampler(range(ROWS), generator=torch.Generator().manual_seed(3)))
    options = {"num_workers": processes, "persistent_workers": processes > 0}
    loader = DataLoader(Pictures(), 8, sampler=order, **options)
    other = iter(DataLoader(Pictures(), 8))  # of an evaluation
    for _ in range(2):
        next(other)
    found = places_fed(probe, loader)
    assert [*map(len, found)] == [8] * (ROWS // 8)
    assert [*chain(*found)] == expected
    again = [*chain(*places_fed(probe, loader))]
    assert sorted(again) == list(range(ROWS))
    assert again != expected


@pytest.mark.parametrize(("processes", "missed"), [(0, 1), (2, 5)])
def test_batches_that_were_asked_for_before_are_left_out(processes, missed):
    batches = iter(DataLoader(Pictures(), 8, num_workers=processes))
    first = next(batches)
    probe = SampleProbe(plainly)
    found = places_fed(probe, [first]) + places_fed(probe, batches)
    probe.close()
    later = [list(range(at, at + 8)) for at in range(8 * missed, ROWS, 8)]
    assert found == [[]] * missed + later


def test_a_step_of_which_a_batch_was_asked_for_before_has_no_samples():
    batches = iter(DataLoader(Pictures(), 8))
    early = next(batches)
    probe = SampleProbe(plainly)
    probe.on_inputs((early + 1,), {}, 0)
    probe.on_inputs((next(batches) + 1,), {}, 1)
    assert probe._samples.places() is None
    assert not probe._samples.collect()
    found = places_fed(probe, batches)
    probe.close()
    assert found[0] == list(range(16, 24))


class Repeated(DistributedSampler):
    """Repeated augmentation: several ranks are to draw one row."""

    num_repeats = 3


class Keys(Dataset):
    def __init__(self):
        self.paths = PATHS

    def __len__(self):
        return ROWS

    def __getitem__(self, key):
        return torch.randn(6)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Pictures(), 8, sampler=Repeated(Pictures(), 2, 0)),
        DataLoader(Keys(), 8, sampler=PATHS),
        DataLoader(TensorDataset(torch.randn(ROWS, 6)), 8, collate_fn=lambda _: torch.ones(5, 6)),
    ],
)
def test_places_that_are_no_rows_of_the_batch_are_unknown(probe, loader):
    assert places_fed(probe, loader)[1:] == [None] * (len(loader) - 1)


def test_a_data_set_that_the_training_leaves_is_not_kept(probe):
    data = Pictures()
    assert len(places_fed(probe, DataLoader(data, 8))) == 8
    left = weakref.ref(data)
    del data
    gc.collect()
    assert left() is None


def combined(combiner, samples, rows, digests):
    columns = {n: np.zeros(2, np.int64) for n in ("samples_named", "num_samples", "batch_digest")}
    columns["rows_digest"] = np.array(digests, np.int64)
    messages = {
        name: Ragged.of([np.array(own, np.int64) for own in each])
        for name, each in (("samples_B", samples), ("rows_B", rows))
    }
    found = combiner.combine(messages, columns)["samples"]
    return [one.tolist() for one in found], columns["samples_named"].tolist()


def test_rows_stand_for_samples_where_all_workers_have_the_same_ones():
    content, rows, none = [[101, 102], [103, 104]], [[1, 2], [2, 3]], [[], []]
    unknown = [MISSING_INT, MISSING_INT]
    combiner = Samples(Layout(2))
    assert combined(combiner, none, none, unknown) == (none, [0, 0])  # left out
    assert combined(combiner, content, none, unknown) == (content, [0, 0])
    for _ in range(2):
        assert combined(combiner, content, rows, [7, 7]) == (rows, [1, 1])
    assert combined(combiner, none, none, unknown) == (none, [0, 0])
    assert combined(combiner, content, rows, [7, 7]) == (rows, [1, 1])
    assert combined(combiner, content, rows, [7, 8]) == (content, [0, 0])
    assert combined(combiner, content, rows, [7, 7]) == (content, [0, 0])  # no mixture again


def train_augmented(rank, folder):
    """Train on pictures with noise: split rightly, and in one order each epoch."""
    for name in ("right", "one_order"):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(6, 6))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        torch.manual_seed(rank)  # of the noise
        sampler = DistributedSampler(Pictures(), seed=5)
        loader = DataLoader(Pictures(), 4, sampler=sampler)
        with watch(model, optimizer, run_dir=f"{folder}/{name}", canary=False) as scope:
            for epoch in range(3):
                if name == "right":
                    sampler.set_epoch(epoch)
                for batch in loader:
                    loss = model(batch).square().mean()
                    scope.loss(loss)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()


@pytest.mark.ranks
def test_laws_of_samples_hold_under_augmentation(tmp_path):
    run_ranks(train_augmented, 2, tmp_path)
    found = {}
    for name in ("right", "one_order"):
        run = Run.open(tmp_path / name)
        found[name] = {one.cause for one in told(run, "data.").values()}
        assert set(chain(*run.table("samples").column("samples").to_pylist())) == {*range(ROWS)}
    assert found == {"right": set(), "one_order": {"data.repeated_order"}}
