"""Trains on one rank, then raises from inside of torch; its traceback is the test's point."""

import sys
import traceback

import torch
import torch.distributed as dist
from plain_training import batch, build
from torch.nn import functional as F


def fail_in_forward(model):
    try:
        model(torch.zeros(3, 7))
    except RuntimeError:
        frames = traceback.extract_tb(sys.exc_info()[2])
        own = [
            (frame.filename, frame.lineno) for frame in frames if "/torch/" not in frame.filename
        ]
        print(own)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
    model, optimizer = build("ddp")
    fail_in_forward(model)
    for number in range(2):
        x, y = batch(0, number)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    loss.backward()


if __name__ == "__main__":
    main()
