"""Rows of a data set stand for samples where augmentation makes other content of each."""

import gc
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
    RandomSampler,
    Subset,
    TensorDataset,
)

from rankscope import Run
from rankscope.bus.step import MISSING_INT
from rankscope.evidence.samples.judge import Samples
from rankscope.evidence.samples.probe import SampleProbe
from rankscope.stats.arrays import Ragged
from rankscope.wrappers.datasets import digests_by_field, rows_digest
from support.findings import told
from support.loops import watch
from support.ranks import run_ranks

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
    """Paths and labels, as of a folder of images."""

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
    "data", [Made(), [object() for _ in range(9)], iter([]), Subset(Made(), [1])]
)
def test_what_is_made_anew_or_has_no_content_has_none(data):
    assert rows_digest(data) is None


def plainly(work, *args):
    work(*args)


def fed(probe, batches):
    """Return the places that the probe knows of each batch; ``[]`` where it leaves samples out."""
    found = []
    for batch in batches:
        probe.on_inputs((batch + 1,), {}, 0)
        places = probe._samples.places()
        seen = probe._samples.collect()
        found.append([] if not seen else None if places is None else places[0].tolist())
    return found


@pytest.fixture(name="probe")
def make_probe():
    probe = SampleProbe(plainly)
    yield probe
    probe.close()


@pytest.mark.parametrize("processes", [0, 2])
def test_a_loader_s_places_are_those_of_its_sampler(probe, processes):
    kept = processes > 0
    order = RandomSampler(range(ROWS), generator=torch.Generator().manual_seed(3))
    expected = list(RandomSampler(range(ROWS), generator=torch.Generator().manual_seed(3)))
    loader = DataLoader(
        Pictures(), 8, sampler=order, num_workers=processes, persistent_workers=kept
    )
    other = iter(DataLoader(Pictures(), 8))  # of an evaluation
    for _ in range(2):
        next(other)
    found = fed(probe, loader)
    assert [*map(len, found)] == [8] * (ROWS // 8)
    assert [*chain(*found)] == expected
    again = [*chain(*fed(probe, loader))]
    assert sorted(again) == list(range(ROWS))
    assert again != expected


@pytest.mark.parametrize(("processes", "missed"), [(0, 1), (2, 5)])
def test_batches_that_were_asked_for_before_are_left_out(processes, missed):
    batches = iter(DataLoader(Pictures(), 8, num_workers=processes))
    first = next(batches)
    probe = SampleProbe(plainly)
    found = fed(probe, [first]) + fed(probe, batches)
    probe.close()
    later = [list(range(at, at + 8)) for at in range(8 * missed, ROWS, 8)]
    assert found == [[]] * missed + later


class Repeated(DistributedSampler):
    """Repeated augmentation: several ranks are to draw one row."""

    num_repeats = 3


class Keys(Dataset):
    """Rows by name."""

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
        DataLoader(
            TensorDataset(torch.randn(ROWS, 6)), 8, collate_fn=lambda rows: torch.ones(5, 6)
        ),
    ],
)
def test_places_that_are_no_rows_of_the_batch_are_unknown(probe, loader):
    assert fed(probe, loader)[1:] == [None] * (len(loader) - 1)


def test_a_data_set_that_the_training_leaves_is_not_kept(probe):
    data = Pictures()
    assert len(fed(probe, DataLoader(data, 8))) == 8
    left = weakref.ref(data)
    del data
    gc.collect()
    assert left() is None


def combined(combiner, samples, rows, digests):
    """Return the samples that stand for those of two workers, and whether they count as named."""
    lengths = np.array([len(one) for one in samples])
    row_lengths = np.array([len(one) for one in rows])
    columns = {
        "rows_digest": np.array(digests, np.int64),
        "samples_named": np.zeros(2, np.int64),
        "num_samples": np.zeros(2, np.int64),
        "batch_digest": np.zeros(2, np.int64),
    }
    messages = {
        "samples_B": Ragged(np.concatenate(samples).astype(np.int64), lengths),
        "rows_B": Ragged(np.concatenate(rows).astype(np.int64), row_lengths),
    }
    found = combiner.combine(messages, columns)["samples"]
    return [one.tolist() for one in found], columns["samples_named"].tolist()


def test_rows_stand_for_samples_where_all_workers_have_the_same_ones():
    content, rows, none = [[101, 102], [103, 104]], [[1, 2], [2, 3]], [[], []]
    unknown = [MISSING_INT, MISSING_INT]
    combiner = Samples()
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
        drawn = run.table("samples").column("samples").to_pylist()
        assert set(chain(*drawn)) == {*range(ROWS)}
    assert found == {"right": set(), "one_order": {"data.repeated_order"}}
