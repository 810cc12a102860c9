"""The mean over workers against one that is added up in rank order, without any ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rankscope.lab.reductions.reduction import OrderedMean
from support.ranks import run_ranks


def average(mean: OrderedMean, buffer: Tensor) -> Tensor:
    exchange = mean.start(buffer)
    mean.finish(exchange)
    result = exchange.result.wait()
    assert result.data_ptr() == buffer.data_ptr()
    return result


def average_cancelling(rank: int) -> list[list[float]]:
    mean = OrderedMean(dist.group.WORLD, torch.device("cpu"))
    columns = torch.tensor([[1e8, 1e8, 1.0], [1.0, -1e8, 1e8], [-1e8, 1.0, -1e8]])
    wide = torch.tensor([[60000.0], [60000.0], [-30000.0]]).half()
    return [average(mean, part[rank].clone()).tolist() for part in (columns, wide)]


@pytest.mark.ranks
def test_order_and_precision_are_visible():
    # (1e8 + 1) − 1e8 is 0 in fp32, (1e8 − 1e8) + 1 is 1, (1 + 1e8) − 1e8 is 0;
    # 60,000 + 60,000 is more than fp16 can hold
    third = torch.tensor(1.0).div(3).item()
    for columns, wide in run_ranks(average_cancelling, 3):
        assert columns == [0.0, third, 0.0]
        assert wide == [30000.0]


def abandon_then_average(rank: int) -> list[float]:
    mean = OrderedMean(dist.group.WORLD, torch.device("cpu"))
    mean.start(torch.full((100_001,), 7.0 + rank)).abandon()
    return average(mean, torch.full((100_001,), float(rank))).unique().tolist()


@pytest.mark.ranks
def test_an_abandoned_exchange_leaves_no_trace():
    assert run_ranks(abandon_then_average, 2) == [[0.5], [0.5]]
