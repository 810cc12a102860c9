"""Samples as token ids, the labels of the loss, and the batches that a worker draws."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, TensorDataset

from rankscope.errors import DataError, UsageError
from rankscope.lab.study.config import Combination, ShardReading
from rankscope.lab.study.data import Record, prompt
from rankscope.stats.tokens import IGNORED_LABEL

IGNORED = IGNORED_LABEL  # label of tokens that do not count in the loss: prompt and padding

_CHUNK = 2048


@dataclass(frozen=True, slots=True)
class EncodedSet:
    """Encoded samples in flat arrays, so that tens of thousands stay small.

    ``tokens`` are all samples' one after another: prompt, response, end token; ``starts`` ``[N +
    1]`` where each begins, and the end of the last; ``prompt_lengths`` ``[N]`` how many are the
    prompt's; ``indices`` ``[N]`` are those in the file. Samples whose response is cut off by
    the maximum length are kept (``truncated``), or left out if all of it is
    (``skipped_truncated``).
    """

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    prompt_lengths: NDArray[np.int32]
    indices: NDArray[np.int64]
    pad_token_id: int
    truncated: int
    skipped_truncated: int

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample, ``[N]``."""
        return np.diff(self.starts)

    def collate(self, positions: Sequence[int]) -> tuple[dict[str, Tensor], list[int]]:
        """Make a batch of the samples at some positions, padded on the right to the longest.

        That is the model's arguments ``input_ids``, ``attention_mask`` and ``labels``, int64
        ``[len(positions), longest]``, and the samples' indices in the file.
        """
        starts = self.starts[positions]
        lengths = self.starts[np.add(positions, 1)] - starts
        heads = self.prompt_lengths[positions]
        shape = (len(positions), int(lengths.max()))
        input_ids = np.full(shape, self.pad_token_id, dtype=np.int64)
        attention_mask = np.zeros(shape, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        for row, (start, length, head) in enumerate(zip(starts, lengths, heads, strict=True)):
            tokens = self.tokens[start : start + length]
            input_ids[row, :length] = tokens
            attention_mask[row, :length] = 1
            labels[row, head:length] = tokens[head:]
        arrays = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return tensors, self.indices[positions].tolist()


def encode(
    records: Sequence[Record],
    tokenizer: Any,  # of transformers, with an end token
    max_length: int,  # longest sample in tokens; longer ones are cut at the end
) -> EncodedSet:
    """Turn records into prompt, response and end token, with labels on the response only.

    Prompt and response are encoded apart, so that the labels begin exactly at the response. A
    begin token is put in front where the tokenizer itself would.
    """
    eos = tokenizer.eos_token_id
    if eos is None:
        raise UsageError("the model's tokenizer has no end token: choose a model that has one")
    prefix = _prefix(tokenizer)
    pieces: list[NDArray[np.int32]] = []
    prompt_lengths: list[int] = []
    indices: list[int] = []
    truncated = 0
    heads = _ids(tokenizer, [prompt(record) for record in records])
    tails = _ids(tokenizer, [record.output for record in records])
    for record, head, tail in zip(records, heads, tails, strict=True):
        prompt_length = len(prefix) + len(head)
        if prompt_length >= max_length:
            continue
        ids = [*prefix, *head, *tail, eos]
        truncated += len(ids) > max_length
        pieces.append(np.array(ids[:max_length], dtype=np.int32))
        prompt_lengths.append(prompt_length)
        indices.append(record.index)
    if not pieces:
        raise DataError(
            f"no sample keeps a token of its response within {max_length} tokens: "
            "raise the maximum length"
        )
    return EncodedSet(
        tokens=np.concatenate(pieces),
        starts=np.cumsum([0, *map(len, pieces)], dtype=np.int64),
        prompt_lengths=np.array(prompt_lengths, dtype=np.int32),
        indices=np.array(indices, dtype=np.int64),
        pad_token_id=eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        truncated=truncated,
        skipped_truncated=len(records) - len(pieces),
    )


def _prefix(tokenizer: Any) -> list[int]:
    """Return the begin token if the tokenizer puts one in front of a text, else nothing."""
    bos = tokenizer.bos_token_id
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    return [bos] if bos is not None and full[:1] == [bos] and plain[:1] != [bos] else []


def _ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    ids: list[list[int]] = []
    for start in range(0, len(texts), _CHUNK):
        chunk = texts[start : start + _CHUNK]
        ids += tokenizer(
            chunk, add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
    return ids


def draw_batches(
    combination: Combination,
    *,
    num_samples: int,
    batch_size: int,
    rank: int,
    num_workers: int,
    seed: int,
) -> Iterator[list[int]]:
    """Yield batches of positions ``0 … num_samples − 1`` for one worker, epoch after epoch.

    Both readings use torch's own samplers, as training scripts do. Incomplete batches at the end
    of an epoch are dropped.
    """
    own_seed = combination.setting.seed_of(rank, seed)
    positions = TensorDataset(torch.arange(num_samples))
    sharded: DistributedSampler[Any] = DistributedSampler(
        positions, num_workers, rank, shuffle=True, seed=own_seed
    )
    replicated = RandomSampler(positions, generator=torch.Generator().manual_seed(own_seed))
    sampler = sharded if combination.reading is ShardReading.SHARDED else replicated
    check_enough_samples(combination.reading, num_samples, batch_size, num_workers)
    epoch = 0
    while True:
        sharded.set_epoch(epoch)
        yield from BatchSampler(sampler, batch_size, drop_last=True)
        epoch += 1


def check_enough_samples(
    reading: ShardReading, num_samples: int, batch_size: int, num_workers: int
) -> None:
    """Raise a UsageError when a worker's share cannot fill one batch."""
    if num_workers > num_samples:
        raise UsageError(
            f"expected at least one sample per worker, got {num_samples} samples for "
            f"{num_workers} workers; use fewer --workers or more data"
        )
    share = num_samples if reading is ShardReading.REPLICATED else num_samples // num_workers
    if share < batch_size:
        raise UsageError(
            f"expected at least one batch of {batch_size} per worker, got {share} samples each; "
            "use a smaller --batch-size, fewer --workers or more data"
        )
