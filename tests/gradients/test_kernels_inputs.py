"""What is read of a batch in C is what numpy and torch read."""

import pytest
import torch

from rankscope.evidence.loss import probe as loss
from rankscope.gradients.kernels.native import count_labels, digest_samples
from rankscope.wrappers import labels as labels_module
from rankscope.wrappers import samples
from rankscope.wrappers.facts import FLAGS_EVERY, PrecisionMeter
from support.kernel_checks import needs_compiler

CPU = torch.device("cpu")


def digests_of(monkeypatch, batch, mask, native):
    if not native:
        monkeypatch.setattr(samples, "digest_samples", lambda *_: None)
    found = samples.digest_inputs((), {"input_ids": batch, "attention_mask": mask}).tolist()
    monkeypatch.undo()
    return found


@needs_compiler
@pytest.mark.parametrize("mask", [None, torch.bool, torch.int64])
@pytest.mark.parametrize("length", [1, samples.MAX_WORDS, samples.MAX_WORDS + 5])
def test_digests_of_samples_are_those_without_a_compiler(monkeypatch, mask, length):
    batch = torch.randint(-(2**62), 2**62, (3, length))
    present = None if mask is None else (torch.rand(3, length) < 0.7).to(mask)
    at = samples._weights(CPU).data_ptr()
    read = digest_samples(batch, present, at, samples.MAX_WORDS, samples._MIX)
    assert (read is None) == (mask is None and length > samples.MAX_WORDS)  # read at a stride
    native, plain = (digests_of(monkeypatch, batch, present, each) for each in (True, False))
    assert native == plain
    assert len(set(native)) == (3 if present is None or length > 1 else len(set(native)))


@needs_compiler
@pytest.mark.parametrize("shape", [(6,), (2, 3, 4), (2, 0)])
@pytest.mark.parametrize("shifted", [False, True])
def test_label_tokens_are_those_that_torch_counts(monkeypatch, shape, shifted):
    labels = torch.randint(-101, -98, shape)
    first = int(shifted and len(shape) > 1)
    assert count_labels(labels, loss.IGNORED_LABEL, first=first) is not None
    native = loss.count_label_tokens({"labels": labels}, shifted=shifted)
    monkeypatch.setattr(labels_module, "count_labels", lambda *_, **__: None)
    assert torch.equal(native, loss.count_label_tokens({"labels": labels}, shifted=shifted))


def test_a_new_setting_of_precision_is_seen_within_some_steps():
    meter = PrecisionMeter(torch.nn.Linear(1, 1), CPU)
    before = meter.code(1)
    torch.use_deterministic_algorithms(True)
    try:
        codes = [meter.code(step) for step in range(2, FLAGS_EVERY + 1)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert set(codes[:-1]) == {before} != {codes[-1]}
    with torch.autocast("cpu", torch.bfloat16):
        assert meter.code(FLAGS_EVERY + 1) not in (before, codes[-1])
