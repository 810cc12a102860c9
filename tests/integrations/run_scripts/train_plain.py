"""An ordinary script, started by torchrun; imports its neighbour and ends as it is told to."""

import json
import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from plain_training import build, digest, train
from torch.distributed import destroy_process_group
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel


def main():
    kind, output, end = sys.argv[1:]
    torch.set_num_threads(1)
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(name)s: %(message)s")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, optimizer = build(kind)
    train(rank, model, optimizer)
    logging.info("rank %d has trained", rank)
    told = {"argv": sys.argv[1:], "path": sys.path, "digest": digest(model)}
    told["hooked"] = [
        c.__name__ for c in (DistributedDataParallel, FSDPModule) if "__call__" in vars(c)
    ]
    Path(f"{output}.{rank}").write_text(json.dumps(told))
    if end == "destroy":
        destroy_process_group()
    else:
        dist.barrier()
    sys.exit(int(end == "exit 3") * 3)


if __name__ == "__main__":
    main()
