"""Simulated jobs: which samples each worker draws, by samplers written with numpy alone."""

from itertools import islice

import numpy as np

from rankscope.agent.assembly import summarize
from rankscope.bus.evidence import DType, Source, Table
from rankscope.bus.step import GatheredStep
from rankscope.evidence import columns_of
from rankscope.stats.arrays import MISSING_INT

_MISSING = {DType.FLOAT: np.nan, DType.INT: MISSING_INT, DType.BOOL: False}
_NUMPY = {DType.FLOAT: np.float64, DType.INT: np.int64, DType.BOOL: np.bool_}


def worker_columns(num_workers, **known):
    """Return all columns that workers send, without a value where none is known."""
    columns = {
        s.name: np.full(num_workers, _MISSING[s.dtype], _NUMPY[s.dtype])
        for s in columns_of(Table.WORKERS, Source.LOCAL)
    }
    return columns | {
        name: np.asarray(values, columns[name].dtype) for name, values in known.items()
    }


def gathered(step, samples, sketches_WK=None, **columns):
    """Return a step in which workers drew these samples and report these columns."""
    num_samples = [len(batch) for batch in samples]
    workers = worker_columns(len(samples), **{"num_samples": num_samples, **columns})
    return GatheredStep(
        step=step,
        time=float(step),
        observed=sketches_WK is not None,
        workers=workers,
        sketches_WK=sketches_WK,
        samples=tuple(np.asarray(batch, np.int64) for batch in samples),
    )


def reports(stream, num_steps, *, named=True):
    return [
        summarize(gathered(t, batches, samples_named=[named] * len(batches)))
        for t, batches in enumerate(islice(stream, num_steps))
    ]


def shard(num_samples, num_workers, rank, seed, epoch, *, drop_last=False, shuffle=True):
    """One worker's share of an epoch: every W-th sample of a permutation that is padded or cut."""
    order = np.arange(num_samples)
    if shuffle:
        order = np.random.default_rng([seed, epoch]).permutation(num_samples)
    if drop_last:
        order = order[: num_samples // num_workers * num_workers]
    else:
        order = np.resize(order, -(-num_samples // num_workers) * num_workers)
    return order[rank::num_workers]


def sharded(
    num_samples,
    num_workers,
    batch,
    *,
    seeds=None,
    drop_last=False,
    loader_drop_last=False,
    shuffle=True,
    reshuffle=True,
):
    """Yield batches of a sharded job, epoch after epoch; ``seeds`` has one seed per worker."""
    seeds = seeds or [0] * num_workers
    epoch = 0
    while True:
        shares = [
            shard(
                num_samples,
                num_workers,
                rank,
                seeds[rank],
                epoch if reshuffle else 0,
                drop_last=drop_last,
                shuffle=shuffle,
            )
            for rank in range(num_workers)
        ]
        share_size = len(shares[0])
        end = share_size // batch * batch if loader_drop_last else share_size
        for start in range(0, end, batch):
            yield [share[start : min(start + batch, end)] for share in shares]
        epoch += 1


def replicated(num_samples, batch, seeds):
    """Yield batches of workers that each shuffle all samples, by a seed of their own."""
    generators = [np.random.default_rng(seed) for seed in seeds]
    while True:
        orders = [generator.permutation(num_samples) for generator in generators]
        for start in range(0, num_samples - batch + 1, batch):
            yield [order[start : start + batch] for order in orders]


def with_replacement(num_samples, num_workers, batch, seed=0):
    generator = np.random.default_rng(seed)
    while True:
        yield list(generator.integers(0, num_samples, (num_workers, batch)))


def accumulated(stream, micro):
    """Join consecutive batches into steps, across the borders of epochs."""
    while True:
        parts = list(islice(stream, micro))
        yield [np.concatenate(batches) for batches in zip(*parts, strict=True)]
