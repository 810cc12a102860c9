"""A transformer of 10 million parameters, alone, under DDP or FSDP2: what a comparison costs."""

import argparse
import atexit
import os
import resource
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--steps", type=int, default=0, help="0: more than a comparison lets it")
parser.add_argument("--width", type=int, default=320)
parser.add_argument("--fsdp", action="store_true")
parser.add_argument("--modules", action="store_true", help="import what a comparison imports")
parser.add_argument("--peaks", type=Path, help="folder for the peak memory of each process")
chosen = parser.parse_args()
VOCABULARY, WIDTH, LENGTH = 4096, chosen.width, 64


class Model(nn.Module):
    """A language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 5, 4 * WIDTH, 0.0, batch_first=True) for _ in range(6)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(hidden)
        return logits


def keep_peak(folder: Path) -> None:
    """Write the largest resident size of this process so far, in bytes."""
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (folder / f"{world}-{os.getpid()}").write_text(str(peak))


if chosen.modules:
    import rankscope.evidence.parity.probe
    import rankscope.wrappers.backward_loss
    import rankscope.wrappers.pipelining  # noqa: F401
torch.set_num_threads(1)
world = int(os.environ.get("WORLD_SIZE", "1"))
rank = int(os.environ.get("RANK", "0"))
if chosen.peaks:
    atexit.register(keep_peak, chosen.peaks)
torch.manual_seed(0)
model: nn.Module = Model()
if world > 1:
    dist.init_process_group("gloo")
    if chosen.fsdp:
        for block in model.layers:  # type: ignore[union-attr]
            fully_shard(block)
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(chosen.steps or 100):
    draw = torch.Generator().manual_seed(step)
    rows = torch.randint(VOCABULARY, (chosen.batch * world, LENGTH + 1), generator=draw)
    own = rows[rank::world]
    F.cross_entropy(model(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
if world > 1:
    dist.destroy_process_group()
