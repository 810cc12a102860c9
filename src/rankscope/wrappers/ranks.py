"""The ranks of a process group."""

import torch.distributed as dist


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    """Return the ranks of a process group, in its order.

    torch returns them as they were given to it: perhaps as numbers of numpy, which JSON refuses.
    """
    return [int(rank) for rank in dist.get_process_group_ranks(group)]
