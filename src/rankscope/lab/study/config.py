"""The options of a study: settings, readings, precision."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rankscope.errors import UsageError

MAX_SEED = 2**31 - 1  # far below what random generators take, so that a worker's own seed fits too


class ShardReading(StrEnum):
    """How workers get their samples; the paper's text admits both."""

    SHARDED = "sharded"  # each worker draws from its own shard (``DistributedSampler``)
    REPLICATED = "replicated"  # each worker draws from the whole set: equal seeds, equal batches


class Setting(StrEnum):
    """The paper's three seed settings."""

    S1_1 = "s1-1"  # all workers share the seed
    S1_2 = "s1-2"  # worker 0 has another seed
    S1_3 = "s1-3"  # every worker has its own seed

    def seed_of(self, rank: int, seed: int) -> int:
        """Return the seed of one worker's random generators and sample order."""
        if self is Setting.S1_1:
            return seed
        if self is Setting.S1_2:
            return seed + 1000 if rank == 0 else seed
        return seed + 1000 * (rank + 1)


class Precision(StrEnum):
    """Arithmetic of forward and backward passes; parameters stay in fp32."""

    AUTO = "auto"  # bf16 on an accelerator, fp32 on a CPU
    FP32 = "fp32"
    BF16 = "bf16"


@dataclass(frozen=True, slots=True)
class Combination:
    """One training of a study: a reading and a setting."""

    reading: ShardReading
    setting: Setting

    @property
    def name(self) -> str:
        """Name of its run directory: ``sharded-s1-1``."""
        return f"{self.reading}-{self.setting}"


@dataclass(frozen=True, slots=True)
class StudyConfig:
    """All options of a study; the same options and seed give the same numbers."""

    # ``builtin``, a JSON or JSONL file in Alpaca's format, or a Hugging Face data set
    data: str = "builtin"
    model: str = "tiny"  # ``tiny``, ``pangu-1b``, or a Hugging Face name or directory
    weights: str = ""  # directory of published weights for ``pangu-1b``; empty for random ones
    workers: int = 8  # W, the number of workers
    steps: int = 64  # optimizer steps per combination; 64 complete all checks
    batch_size: int = 4  # samples per worker and micro-batch
    accumulation: int = 1  # micro-batches per step
    # readings to try
    readings: tuple[ShardReading, ...] = (ShardReading.SHARDED, ShardReading.REPLICATED)
    settings: tuple[Setting, ...] = (Setting.S1_1, Setting.S1_2, Setting.S1_3)  # settings to try
    seed: int = 0  # seed of everything
    limit: int | None = None  # first N records of the data; None for all
    max_length: int = 1024  # longest sample in tokens
    learning_rate: float = 0.0  # adamW's learning rate; 0 for the model's default
    precision: Precision = Precision.AUTO  # arithmetic of forward and backward passes
    save_all: bool = False  # save the models of all combinations, not of the sharded reading alone

    def __post_init__(self) -> None:
        least = {"workers": 2, "steps": 1, "batch_size": 1, "accumulation": 1}
        for name, number in least.items():
            if getattr(self, name) < number:
                raise UsageError(
                    f"--{name.replace('_', '-')} must be at least {number}, got "
                    f"{getattr(self, name)}"
                )
        if self.max_length < 2:
            raise UsageError(f"--max-length must be at least 2 tokens, got {self.max_length}")
        if not 0 <= self.learning_rate < math.inf:
            raise UsageError(f"--learning-rate must be a positive number, got {self.learning_rate}")
        if not 0 <= self.seed <= MAX_SEED:
            raise UsageError(f"--seed must be between 0 and {MAX_SEED}, got {self.seed}")
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"--limit must be at least 1 record, got {self.limit}")
        if self.weights and self.model != "pangu-1b":
            raise UsageError(
                f"--weights loads into --model pangu-1b only, got --model {self.model}; "
                "give the directory as --model instead"
            )
        if self.weights and not Path(self.weights).is_dir():
            raise UsageError(f"--weights expected a directory, got {self.weights}")

    @property
    def combinations(self) -> Iterator[Combination]:
        """All trainings, in order."""
        for reading in self.readings:
            for setting in self.settings:
                yield Combination(reading, setting)

    @property
    def effective_learning_rate(self) -> float:
        """The learning rate that is used."""
        return self.learning_rate or (5e-4 if self.model == "tiny" else 2e-5)

    def saves(self, combination: Combination) -> bool:
        """Whether the model of a combination is saved."""
        return self.save_all or combination.reading is ShardReading.SHARDED

    def to_json(self) -> dict[str, Any]:
        """Return the options as plain JSON values."""
        return {**asdict(self), "readings": list(self.readings), "settings": list(self.settings)}
