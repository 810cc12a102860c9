"""The inner product of local and reduced gradient, read while the one is copied over the other."""

import numpy as np
import pytest
import torch
from torch.autograd import Variable

from rankscope.wrappers.guard import Guard
from rankscope.wrappers.reduced_product import NativeDot, ReducedProduct, plain_dot
from support.kernel_checks import needs_compiler

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)


@pytest.fixture(params=["torch", pytest.param("native", marks=needs_compiler)])
def dot(request):
    return plain_dot if request.param == "torch" else NativeDot()


def pair(shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in "ab"]


def expect(dot, one, other):
    a, b = (np.asarray(x.to(torch.complex128).resolve_conj()).ravel() for x in (one, other))
    exact, size = np.vdot(a, b).real, np.linalg.norm(a) * np.linalg.norm(b)
    assert float(dot(one, other)) == pytest.approx(exact, abs=1e-13 * size)


SIZES = (0, 1, 127, 1031, 200_000)


@pytest.mark.parametrize(("dtype", "size"), [*zip(DTYPES, SIZES, strict=True)], ids=str)
def test_every_type_and_size(dot, dtype, size):
    expect(dot, *pair((size,), dtype))


def test_neither_tiny_nor_huge_numbers_are_lost(dot):
    one, other = pair((1000,))
    expect(dot, one * 1e-30, other * 1e-30)
    expect(dot, one * 1e30, other * 1e30)
    one[7] = torch.nan
    assert np.isnan(float(dot(one, other)))


class Backward:
    """A backward pass at whose end something copies, as DDP does."""

    def __init__(self):
        self.failures = []
        self.parameters = {"a": torch.ones(3, 4), "b": torch.ones(5), "c": torch.ones(2)}
        for parameter in self.parameters.values():
            parameter.requires_grad_()
        self.product = ReducedProduct(self.parameters, CPU, Guard(self.failures.append))

    def run(self, finish):
        """Return the local gradients and the product; ``finish`` is DDP's own callback."""
        engine, local = Variable._execution_engine, {}

        def near_end():
            local.update({name: p.grad.clone() for name, p in self.parameters.items()})
            self.product.watch()

        def begin(gradient):
            engine.queue_callback(near_end)
            engine.queue_callback(finish)

        loss = sum((i + 2) * p.square().sum() for i, p in enumerate(self.parameters.values()))
        loss.register_hook(begin)
        loss.backward()
        assert torch._C._len_torch_dispatch_stack() == 0
        return local, self.product.take(self.parameters)

    def copy(self, names, factor=0.5, repeat=1):
        for name in names * repeat:
            gradient = self.parameters[name].grad
            gradient.copy_(gradient * factor + 1)


def test_what_was_not_seen_whole_is_unknown():
    backward = Backward()
    assert backward.product.take({"a"}) is None
    assert backward.run(lambda: backward.copy("ab"))[1] is None
    assert backward.run(lambda: backward.copy("abc", repeat=2))[1] is None  # not by the reduction
    assert backward.run(lambda: backward.copy("abc"))[1] is not None
    assert backward.failures == []
