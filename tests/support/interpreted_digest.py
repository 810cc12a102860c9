"""Reads tensors on the CPU as those of an accelerator: by the Triton kernel, interpreted."""

import functools
import itertools

import torch

from rankscope.evidence.state import readings
from rankscope.evidence.state.readings import PendingDigests
from rankscope.gradients.digest import digest_bits
from rankscope.gradients.kernels import many
from rankscope.wrappers import samples

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.complex64, torch.uint8, torch.bool)


@functools.cache
def _reader() -> many.DeviceReader:
    reader = many.DeviceReader(CPU)
    many.check_reader(reader)
    return reader


def _as_on_device() -> None:
    """From now on, nothing in this process is read in C, and all by the kernel."""
    readings.native_sum = lambda: None
    readings.device_reader = lambda device: _reader()


def errors_of_digests() -> list[str]:
    """Return what differs from the digest of single tensors, of all types and places."""
    _as_on_device()
    generator = torch.Generator().manual_seed(3)
    parts = []
    for dtype, size in itertools.product(DTYPES, (0, 1, 3, 1023)):
        data = torch.randint(0, 256, (size * dtype.itemsize + 8,), generator=generator).byte()
        bits = data[: size * dtype.itemsize]
        tensor = bits.clone().bool() if dtype is torch.bool else bits.view(dtype)
        parts += [(tensor, 0, None), (tensor, 1, max(1, size - 2))]
    parts.append((torch.randn(3 * many.CHUNK_BYTES // 4 + 5), 7, None))
    reading = PendingDigests()
    for part in parts:
        reading.add(*part)
    digests, _ = reading.begin().read()
    return [
        f"{tensor.dtype} [{start}:{stop}] of {tensor.numel()}"
        for (tensor, start, stop), digest in zip(parts, digests, strict=True)
        if digest != digest_bits(tensor, start, stop).known % 2**64
    ]


def squares() -> list[tuple[float, float]]:
    """Return sums of squares by the kernel, and what they should be."""
    _as_on_device()
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)
    tensors = [torch.randn(5001, dtype=dtype) for dtype in dtypes]
    tensors.append(torch.full((9,), 1e30))
    reading = PendingDigests()
    for tensor in tensors:
        reading.add(tensor, 1, 4999, norm=True)
    _, found = reading.begin().read()
    exact = [float(tensor[1:4999].to(torch.complex128).abs().square().sum()) for tensor in tensors]
    return list(zip(found, exact, strict=True))


def batches_that_differ() -> list[str]:
    """Return the batches whose samples have other digests by the kernel than by torch."""
    generator = torch.Generator().manual_seed(1)
    samples.check_launched(CPU)
    tried: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    for dtype, (rows, length) in itertools.product(
        (torch.int64, torch.uint8, torch.bfloat16),
        ((1, 1), (2, 300), (1, samples.MAX_WORDS + 7)),
    ):
        batch = torch.randint(0, 200, (rows, length), generator=generator).to(dtype)
        kept = torch.rand(rows, length, generator=generator) > 0.3
        tried += [(batch, None), (batch, kept), (batch, kept.long())]
    numbers = torch.randint(-99, 99, (6, 40), generator=generator)
    images = torch.randn(4, 3, 8, 8, generator=generator)
    tried += [(numbers.t(), None), (numbers[::2], numbers[::2] > 3), (images, None)]
    tried += [(images.to(memory_format=torch.channels_last), None), (images[:, 0, 0, 0], None)]
    return [
        f"{batch.dtype} {tuple(batch.shape)} {mask is not None}"
        for batch, mask in tried
        if not torch.equal(
            samples.launch_digests(batch, mask), samples._digests_in_torch(batch, mask)
        )
    ]
