"""The mean over workers against one that is added up in rank order, without any ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rankscope.lab.reductions.reduction import OrderedMean
from support.ranks import run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
SIZES = [1, 2, 5, 12, 300_007, 3]  # fewer than W, none left over, some, several blocks, small again


def values_of(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * rank + size)
    return torch.randn(size, generator=generator).mul(10.0 ** (rank - 1)).to(dtype)


def average(mean: OrderedMean, buffer: Tensor) -> Tensor:
    exchange = mean.start(buffer)
    mean.finish(exchange)
    result = exchange.result.wait()
    assert result.data_ptr() == buffer.data_ptr()
    return result


def average_all(rank: int, by_broadcast: bool) -> list[list[bytes]]:
    mean = OrderedMean(dist.group.WORLD, torch.device("cpu"))
    mean._on_cpu = by_broadcast
    means = [
        [average(mean, values_of(rank, size, dtype)) for size in SIZES]
        for dtype in DTYPES
        for _ in range(2)
    ]
    # bf16 travels as raw bits: numpy has no such type
    return [[as_bits(m) for m in row] for row in means]


def as_bits(values: Tensor) -> bytes:
    return bytes(values.view(torch.uint8).numpy())


# The second half is a broadcast per piece on CPUs, and an all-gather elsewhere.
@pytest.fixture(scope="module", params=[(4, True), (3, False)])
def averaged(request):
    return run_ranks(average_all, *request.param)


@pytest.mark.ranks
class TestTheMean:
    def test_is_the_sum_in_rank_order_in_fp32_divided_by_w(self, averaged):
        num_ranks = len(averaged)
        for row, dtype in enumerate(DTYPES):
            for column, size in enumerate(SIZES):
                wide = torch.float64 if dtype == torch.float64 else torch.float32
                total = torch.zeros(size, dtype=wide)
                for rank in range(num_ranks):
                    total = total + values_of(rank, size, dtype).to(wide)
                expected = as_bits((total / num_ranks).to(dtype))
                assert averaged[0][2 * row][column] == expected, (dtype, size)

    def test_has_the_same_bits_on_every_rank_and_in_every_run(self, averaged):
        first = averaged[0]
        assert all(rank == first for rank in averaged)
        assert first[0::2] == first[1::2]
