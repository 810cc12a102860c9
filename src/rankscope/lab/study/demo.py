"""The trainings of ``rankscope demo``: one small job twice, as it should be and with a fault."""

from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler, TensorDataset

from rankscope import watch
from rankscope.errors import RunError
from rankscope.lab.study.builtin import generate
from rankscope.lab.study.launch import WorkerFailedError, launch, stopping_once

HEALTHY = "healthy"
FORGOTTEN = "forgotten-sampler"

_PRELOADED = ["torch._dynamo", "torch.distributed.elastic.multiprocessing.api", __name__]
_TIMEOUT = timedelta(minutes=5)  # of a collective; after it, the training has failed
_SEED = 0
_RECORDS = 1500
_LENGTH = 32
_CHARACTERS = 128


class CharacterModel(nn.Module):
    """A small recurrent language model, whose output has its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_CHARACTERS, 64)
        self.body = nn.GRU(64, 128, batch_first=True)
        self.head = nn.Linear(128, _CHARACTERS)

    def forward(self, characters: Tensor) -> dict[str, Tensor]:
        """Return the mean loss per predicted character of ``[B, L]``."""
        hidden, _ = self.body(self.embedding(characters[:, :-1]))
        logits = self.head(hidden)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), characters[:, 1:].flatten())}


def train_both(output: Path, num_workers: int, num_steps: int, error_log: Path) -> None:
    """Train on this machine, first with a sampler and then without; each records its run."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        error_log.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"{output} cannot be written ({error}); choose another --output") from error
    try:
        with stopping_once():
            work = (_train_both, num_workers, output, num_steps)
            launch(*work, error_log=error_log, preloaded=_PRELOADED)
    except WorkerFailedError as error:
        raise RunError(f"the training failed: {error}") from error


def _train_both(output: Path, num_steps: int) -> None:
    """Train on one rank, which the launcher has started."""
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    try:
        samples = _load_samples()
        own_shard: Sampler[int] = DistributedSampler(samples, seed=_SEED)
        _train(samples, own_shard, output / HEALTHY, num_steps)
        order = torch.Generator().manual_seed(_SEED)
        _train(samples, RandomSampler(samples, generator=order), output / FORGOTTEN, num_steps)
    finally:
        dist.destroy_process_group()


def _load_samples() -> TensorDataset:
    """Return pieces of a text that is made up, no two alike: int64 ``[_LENGTH]`` each."""
    records = generate(_SEED, _RECORDS)
    text = "\n".join(f"{one['instruction']} {one['input']} {one['output']}" for one in records)
    pieces = torch.tensor(list(text.encode("ascii"))).unfold(0, _LENGTH, _LENGTH)
    distinct: Tensor = pieces.unique(dim=0)  # type: ignore[no-untyped-call]
    return TensorDataset(distinct)


def _train(samples: TensorDataset, sampler: Sampler[int], run_dir: Path, num_steps: int) -> None:
    torch.manual_seed(_SEED)
    model = DistributedDataParallel(CharacterModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(samples, batch_size=8, sampler=sampler)
    with watch(model, optimizer, run_dir=run_dir, overhead_budget=None, announce=False):
        for (characters,) in islice(loader, num_steps):
            model(characters)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
