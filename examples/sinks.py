r"""A plain DDP script whose numbers go to more places than its run directory.

To files, and a line on the terminal for each finding:

    torchrun --nproc-per-node 2 examples/sinks.py --forget-sampler --sink jsonl --sink \
        'command:echo "$RANKSCOPE_SEVERITY $RANKSCOPE_CAUSE $RANKSCOPE_EVENT"'

To TensorBoard, with a sink of the script's own beside it:

    pip install '.[tensorboard]'
    torchrun --nproc-per-node 2 examples/sinks.py --sink tensorboard --slowest
    tensorboard --logdir runs/sinks/tensorboard
"""

import argparse

import torch
import torch.distributed as dist
from ddp_two_lines import Counting, Model
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

import rankscope
from rankscope.sinks import RunInfo, Sink, StepValues


class Slowest:
    """A sink of one's own: says at the end which worker was the slowest in most steps."""

    def open(self, run: RunInfo) -> None:
        """Begin to count."""
        self.counts = [0] * run.num_workers

    def step(self, step: StepValues) -> None:
        """Count the worker that was busy for longest before the reduction."""
        seconds = step.by_rank("busy_seconds")
        if seconds:
            self.counts[max(seconds, key=lambda rank: seconds[rank])] += 1

    def finding(self, finding: rankscope.Finding) -> None:
        """Take no notice."""

    def close(self) -> None:
        """Print the counts."""
        print("slowest in so many steps, by rank:", self.counts)


def main() -> None:
    """Train for an epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", default="runs/sinks")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--forget-sampler", action="store_true")
    parser.add_argument("--sink", action="append", default=[])
    parser.add_argument("--slowest", action="store_true")
    options = parser.parse_args()
    sinks: list[str | Sink] = [*options.sink, *([Slowest()] if options.slowest else [])]

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = Counting()
    same = RandomSampler(dataset, generator=torch.Generator().manual_seed(0))
    sampler = same if options.forget_sampler else DistributedSampler(dataset, seed=0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with rankscope.watch(model, optimizer, run_dir=options.run_dir, sinks=sinks):
        for step, batch in enumerate(DataLoader(dataset, batch_size=8, sampler=sampler)):
            if step == options.steps:
                break
            model(**batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
