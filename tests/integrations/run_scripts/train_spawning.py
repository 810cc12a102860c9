"""An ordinary script that starts its own ranks, by ``torch.multiprocessing``."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from plain_training import build, digest, train


def work(rank, store, output):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model, optimizer = build("ddp")
    train(rank, model, optimizer)
    Path(f"{output}.{rank}").write_text(json.dumps({"digest": digest(model)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, args=tuple(sys.argv[1:]), nprocs=2)
