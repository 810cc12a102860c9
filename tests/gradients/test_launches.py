import pytest
import torch

from rankscope.gradients.kernels.launch import Launcher
from support.benchmarks import load_benchmark
from support.kernel_checks import needs_triton


class Kernel:
    """Looks for a compiled kernel in each launch, as Triton does."""

    def __init__(self):
        self.looked_for, self.launched = [], []

    def __getitem__(self, grid):
        def launch(*arguments, **named):
            self.looked_for.append((grid, named))
            self.launched.append(arguments)
            return Compiled(self)

        return launch


class Compiled:
    def __init__(self, kernel):
        self._kernel = kernel

    def __getitem__(self, grid):
        assert len(grid) == 3

        def launch(*arguments):
            self._kernel.launched.append(arguments)

        return launch


def memory(start=0):
    return torch.zeros(64)[start:]  # torch aligns what it allocates


def test_a_launch_like_one_before_is_not_looked_for():
    kernel = Kernel()
    launch = Launcher(kernel)
    first, second = memory(), memory()
    launch(4, first, 7, options={"num_warps": 8}, WIDTH=3, FRESH=True)
    launch(9, second, 8 + 1, options={"num_warps": 8}, WIDTH=3, FRESH=True)
    assert kernel.looked_for == [((4,), {"WIDTH": 3, "FRESH": True, "num_warps": 8})]
    assert kernel.launched[0] == (first, 7)
    assert kernel.launched[1][0] is second
    assert kernel.launched[1][1:] == (9, 3, True)  # constants last, in the kernel's order


@pytest.mark.parametrize(
    ("tensor", "number", "width"),
    [
        (memory(1), 7, 3),
        (memory().double(), 7, 3),
        (memory(), 1, 3),
        (memory(), 1 << 40, 3),
        (memory(), 7, 5),
    ],
)
def test_what_triton_compiles_anew_for_is_looked_for(tensor, number, width):
    kernel = Kernel()
    launch = Launcher(kernel)
    launch(4, memory(), 7, WIDTH=3)
    launch(4, tensor, number, WIDTH=width)
    assert len(kernel.looked_for) == 2


@pytest.mark.slow
@needs_triton
def test_the_number_of_launches_does_not_grow_with_the_number_of_tensors():
    launches = load_benchmark("launches")
    rows = launches.measure((5, 10))
    assert [row["tensors"] for row in rows] == [5, 10]
    assert all(row["of"] == rows[0]["of"] for row in rows)
    assert rows[0]["launches"] <= 12
    assert launches.render(rows).count("\n") == 3
