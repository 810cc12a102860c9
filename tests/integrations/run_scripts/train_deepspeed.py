"""An ordinary DeepSpeed script, started by torchrun: it takes its ranks from the environment."""

import argparse
import json
import sys
from pathlib import Path

import deepspeed
import torch
from plain_training import MICRO, STEPS, Net, batch, digest
from torch.nn import functional as F

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles nothing


def make_engine(**config):
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return deepspeed.initialize(model=net, optimizer=optimizer, **config)[0]


def train(rank, engine, see=lambda loss: None):
    """Train with micro-batches; ``see`` is where a scope may be told the loss."""
    torch.manual_seed(rank)
    for number in range(STEPS * MICRO):
        x, y = batch(rank, number)
        loss = F.cross_entropy(engine(x), y)
        see(loss)
        engine.backward(loss)
        engine.step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True)
    args = deepspeed.add_config_arguments(parser).parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed(verbose=False)
    engine = make_engine(args=args)
    train(engine.global_rank, engine)
    seen = {"argv": sys.argv[1:], "digest": digest(engine.module)}
    Path(f"{args.output}.{engine.global_rank}").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
