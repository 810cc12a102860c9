"""A script that trains a generator in a wrapper, and a discriminator without one."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 8), nn.Linear(8, 1)
    twin = nn.Linear(8, 1)
    twin.weight = critic.weight  # which is one parameter all the same
    wrapped = DistributedDataParallel(generator)
    first = torch.optim.SGD(generator.parameters(), lr=0.1)
    second = torch.optim.SGD(critic.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(12):
        made = wrapped(torch.randn(4, 4))
        second.zero_grad()
        (
            F.softplus(critic(made.detach())) + F.softplus(-critic(torch.rand(4, 8)))
        ).mean().backward()
        for parameter in critic.parameters() if "reduces" in sys.argv else ():
            dist.all_reduce(parameter.grad)
        second.step()
        first.zero_grad()
        F.softplus(-critic(made)).mean().backward()
        first.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
