import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from rankscope.gradients import digest
from rankscope.gradients.digest import digest_tensor
from rankscope.gradients.kernels import bits
from rankscope.gradients.kernels.bits import ROW, ROW_BYTES, native_sum
from support.kernel_checks import needs_compiler

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
          torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
          torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2]  # fmt: skip


def random(size, dtype=torch.float32, seed=0):
    """Any bits; elements of two bytes or more are of all values, NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(2, (size,), generator=generator).bool()
    count = size * dtype.itemsize
    return torch.randint(256, (count,), dtype=torch.uint8, generator=generator).view(dtype)


def value(tensor, **options):
    return int(digest_tensor(tensor, **options))


@pytest.fixture(params=[pytest.param("native", marks=needs_compiler), "torch"])
def kernel(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(bits, "native_sum", lambda: None)
        monkeypatch.setattr(digest, "native_sum", lambda: None)
    else:
        assert native_sum() is not None
    return request.param


def naive(data: bytes) -> int:
    """The definition, in Python's integers."""
    first, second = (keys.tolist() for keys in bits._keys())
    multipliers = bits._multipliers().tolist()
    padded = data + bytes(-len(data) % 8)
    total = 0
    for number, word in enumerate(np.frombuffer(padded, "<i8").tolist()):
        row, place = divmod(number, ROW)
        total += multipliers[row] * (word * first[place] + (word >> 32) * second[place])
    return total % 2**64


@pytest.mark.parametrize("size", [0, 1, ROW_BYTES + 4, 5 * ROW_BYTES - 1])
def test_both_follow_the_definition(kernel, size):
    data = random(size, torch.uint8, seed=size)
    total = bits.sum_words([data] if size else [], torch.device("cpu"))
    assert total == naive(data.numpy().tobytes())


@needs_compiler
@pytest.mark.parametrize("size", [3, 40_003])
def test_native_and_plain_agree(size, monkeypatch):
    for dtype in DTYPES:
        tensor = random(size + 3, dtype, seed=size)[3:]  # at any address
        assert native_sum() is not None
        found = value(tensor)
        with monkeypatch.context() as patch:
            patch.setattr(bits, "native_sum", lambda: None)
            patch.setattr(digest, "native_sum", lambda: None)
            assert value(tensor) == found


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(DTYPES[1:]), st.integers(1, 20_000), st.randoms(use_true_random=False))
def test_every_single_bit_counts(dtype, size, chance):
    tensor = random(size, dtype, seed=size)
    before = value(tensor)
    at, bit = chance.randrange(tensor.nbytes), chance.randrange(8)
    tensor.view(torch.uint8)[at] ^= 1 << bit
    assert value(tensor) != before


def test_length_and_dtype_count(kernel):
    found = {value(torch.zeros(size)) for size in (0, 1, 2, 3, 1000, 4 * ROW)}
    found |= {value(torch.zeros(2, dtype=dtype)) for dtype in DTYPES if dtype != torch.float32}
    assert len(found) == 6 + len(DTYPES) - 1


@pytest.mark.parametrize(
    "view",
    [lambda x: x.t(), lambda x: x[:, 1::3], lambda x: x[:1].expand(300, 500),
     lambda x: x.view(30, 10, 50, 10).permute(2, 0, 3, 1), lambda x: x[7, 9]],
)  # fmt: skip
def test_strides_do_not_count(kernel, view, monkeypatch):
    tensor = view(random(150_000).view(300, 500))
    flat = tensor.contiguous().flatten()
    expected = value(flat)
    assert value(tensor) == expected
    monkeypatch.setattr(digest, "_CPU_ELEMENTS", 1003)
    monkeypatch.setattr(bits, "CHUNK_BYTES", 2 * ROW_BYTES)
    assert value(tensor) == expected
    for start, stop in ((0, None), (3, len(flat) - 5), (len(flat) // 3, len(flat) // 2), (9, 9)):
        assert value(tensor, start=start, stop=stop) == value(flat[start:stop])


@pytest.mark.filterwarnings("ignore:.*quantized tensor:UserWarning")
def test_what_has_no_bits_in_reach_has_a_digest_of_its_description():
    freed = torch.ones(50)
    turned = freed.view(5, 10).t()
    freed.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = torch.empty(5)
    odd = [
        torch.empty(3, device="meta"), torch.empty(4, device="meta"), freed, turned, fake,
        torch.nn.UninitializedParameter(),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    ]  # fmt: skip
    assert len({value(tensor) for tensor in odd}) == len(odd)
    assert [value(tensor) for tensor in odd] == [value(tensor) for tensor in odd]
