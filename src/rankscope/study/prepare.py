"""What is done once before the workers start: data, base model, encoded samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rankscope.study.config import StudyConfig
from rankscope.study.data import Record, load_records
from rankscope.study.encoding import EncodedSet, check_enough_samples, encode
from rankscope.study.models import LoadedModel, load_model


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the workers need; it is sent to each of them.

    Attributes:
        held_out: Records that the study does not train on; the base model comes from them.
        samples: Encoded samples.
        facts: What is worth recording of data and model.
    """

    held_out: Sequence[Record]
    samples: EncodedSet
    facts: dict[str, Any]


def prepare(config: StudyConfig) -> Prepared:
    """Load the data, make sure of the base model, and encode the samples.

    Raises:
        UsageError: Options that cannot work with this data.
        DataError: The data cannot be used.
    """
    records = load_records(config.data, seed=config.seed, limit=config.limit)
    _check_enough(config, len(records.records))  # before the base model is trained
    loaded = load(config, records.held_out, torch.device("cpu"))
    samples = encode(records.records, loaded.tokenizer, config.max_length)
    _check_enough(config, len(samples))
    facts = {
        "model": loaded.label,
        "num_parameters": loaded.num_parameters,
        "data": records.name,
        "data_digest": records.digest,
        "records": records.total,
        "samples": len(samples),
        "skipped_empty": records.skipped_empty,
        "skipped_truncated": samples.skipped_truncated,
        "truncated": samples.truncated,
    }
    return Prepared(records.held_out, samples, facts)


def _check_enough(config: StudyConfig, num_samples: int) -> None:
    for reading in config.readings:
        check_enough_samples(reading, num_samples, config.batch_size, config.workers)


def load(config: StudyConfig, held_out: Sequence[Record], device: torch.device) -> LoadedModel:
    """Load a fresh copy of the study's base model."""
    return load_model(
        config.model,
        weights=Path(config.weights) if config.weights else None,
        seed=config.seed,
        tokenizer_records=held_out,
        device=device,
    )
