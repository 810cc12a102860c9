import random
from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from rankscope.bus.bundles import PlainBatch, pack_batch, unpack_batch
from rankscope.evidence.canary import replay
from rankscope.evidence.canary.batch import (
    MAX_BATCH_BYTES,
    CanaryDeclined,
    capture_batch,
    restore_batch,
)
from rankscope.gradients.totals import fold_signs
from support.models import make_batch, make_model

CPU = torch.device("cpu")


def there_and_back(*args, **kwargs):
    batch = unpack_batch(pack_batch(capture_batch(args, kwargs).plain()))
    return restore_batch(batch, CPU)


@pytest.mark.parametrize(
    "value", [-(2**70), (1, [2.5, {"a": (None,)}]), {1: "one", "two": 2, (3, 4): [5]}]
)
def test_plain_values_come_back_as_they_were(value):
    (back,), kwargs = there_and_back(value, named=value)
    assert back == value
    assert kwargs == {"named": value}
    assert type(back) is (dict if isinstance(value, dict) else type(value))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool])
def test_tensors_of_all_types_keep_their_bits(dtype):
    tensor = torch.arange(12).reshape(3, 4).to(dtype).t()
    (back,), _ = there_and_back(tensor)
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    bits = (t.contiguous().view(torch.uint8) for t in (tensor, back))
    assert torch.equal(*bits)


def test_what_is_kept_does_not_change_with_the_batch():
    ids = torch.arange(3)
    captured = capture_batch((ids,), {})
    ids.zero_()
    (back,), _ = restore_batch(captured.plain(), CPU)
    assert back.tolist() == [0, 1, 2]


class Boxes:
    def __init__(self, size, **fields):
        self.size = size
        vars(self)["fields"] = fields

    def __setattr__(self, name, value):
        assert name == "size", name
        vars(self)[name] = value

    def __getattr__(self, name):
        if name not in vars(self)["fields"]:
            raise AttributeError(name)
        return vars(self)["fields"][name]


def test_objects_stay_in_this_process_alone():
    corners = torch.arange(8.0).view(2, 4)
    samples = [{"image": torch.eye(3), "boxes": Boxes((3, 3), corners=corners, names=["a", "b"])}]
    captured = capture_batch((samples,), {"same": corners}, objects=True)
    ((back,),), named = restore_batch(captured.plain(), CPU)
    boxes = back["boxes"]
    assert (type(boxes), boxes.size, boxes.names) == (Boxes, (3, 3), ["a", "b"])
    assert boxes is not samples[0]["boxes"]
    assert torch.equal(boxes.corners, corners)
    assert boxes.corners is named["same"]
    with pytest.raises(CanaryDeclined, match="holds a value of type Boxes"):
        capture_batch((samples,), {})


class Locked:
    __slots__ = ("__dict__", "secret")


class Closing:
    """An object that ends something with itself."""

    def __del__(self) -> None:
        """End it."""


@pytest.mark.parametrize(
    "value", [Locked(), Closing(), nn.Linear(1, 1), ValueError(), random.Random(0), Boxes(object())]
)
def test_objects_that_are_more_than_their_attributes_are_declined(value):
    with pytest.raises(CanaryDeclined, match="holds a value of type"):
        capture_batch((value,), {}, objects=True)


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (object(), "object"),
        (Pair(1, 2), "Pair"),
        (torch.eye(2).to_sparse(), "sparse"),
        (np.array([None]), "object"),
    ],
)
def test_what_would_need_pickle_is_declined_in_one_sentence(value, named):
    with pytest.raises(CanaryDeclined, match=f"the batch holds a .*{named}.*cannot be kept"):
        capture_batch((), {"x": value})


def test_batches_without_end_or_too_large_are_declined():
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(CanaryDeclined, match="contains itself"):
        capture_batch((loop,), {})
    with pytest.raises(CanaryDeclined, match="larger than 64 MiB"):
        capture_batch((torch.empty(MAX_BATCH_BYTES + 1, dtype=torch.uint8),), {})


TENSOR = {"tensor": 0, "dtype": "float32", "host": True}
DEEP: list[object] = []
for _ in range(5000):
    DEEP = [{"list": DEEP}]


@pytest.mark.parametrize(
    "value",
    [
        *({**TENSOR, "tensor": index} for index in (-1, True, "0")),
        *({**TENSOR, "dtype": name} for name in ("float64", "nn")),
        *({"array": 1, "scalar": False}, {"list": 3}, {"dict": [1]}),
        {"object": "Boxes", "members": {"dict": []}},
        {"list": DEEP},
    ],
)
def test_structures_that_are_none_are_declined(value):
    structure = {"tuple": [{"tuple": [value]}, {"dict": []}]}
    batch = PlainBatch(structure, (np.ones((2, 2), np.float32),))
    with pytest.raises(CanaryDeclined, match="cannot be brought back"):
        restore_batch(batch, CPU)


# The run --------------------------------------------------------------------------------------


def generators() -> tuple[object, ...]:
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002
    state = numpy["state"]["key"].tobytes(), numpy["state"]["pos"]
    return random.getstate(), state, torch.get_rng_state().tolist()


def run(model, *args, seed=1, **kwargs):
    return replay.run_batch(model, capture_batch(args, kwargs).plain(), CPU, seed=seed).read()


def test_loss_and_gradient_are_those_of_the_batch():
    model, batch = make_model(dropout=0.0), make_batch(0, 0)
    result = run(model, **batch)
    loss = model(**batch)["loss"]
    loss.backward()
    norm = torch.cat([p.grad.flatten().double() for p in model.parameters()]).norm()
    assert result.loss == loss.item()
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-6)


def test_the_state_of_a_model_has_another_digest_when_any_tensor_of_it_changes():
    model = nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(20)))
    digests = [replay.state_digest(model)]
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data += 1
        digests.append(replay.state_digest(model))
    assert len(set(digests)) == 1 + 20 * 5


@pytest.mark.parametrize("arrived", [(True, True, True), (True, False, True)])
def test_a_canary_can_be_read_once_all_its_results_have_arrived(arrived):
    results = tuple(SimpleNamespace(ready=one) for one in arrived)
    assert replay.PendingCanary(0, 1, results).ready == all(arrived)


class Attending(nn.Linear):
    """Attends by an operator of higher order, whose backward pass no CPU knows."""

    def forward(self, x):
        hidden = super().forward(x)
        return (hidden * flex_attention(*[hidden.detach()[None, None]] * 3)).mean()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_operators_of_higher_order_are_run():
    model, x = Attending(16, 16), torch.randn(8, 16)
    assert run(model, x).loss == model(x).item()


class Returns(nn.Module):
    def __init__(self, make) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(3, 4), make

    def forward(self, x):
        return self.make(self.layer(x))


def test_a_model_without_a_loss_is_tested_by_a_projection_of_its_outputs():
    x = torch.randn(9000, 3)
    model = Returns(lambda y: {"logits": y, "other": (y[:2] * 2, y.argmax(1))})
    result = run(model, x)
    assert result.grad_norm > 0
    moved = Returns(lambda y: {"logits": y.roll(1, 0), "other": (y[:2] * 2, y.argmax(1))})
    moved.load_state_dict(model.state_dict())
    assert run(moved, x).loss != result.loss  # it knows positions
    fold_signs.cache_clear()  # as on a rank that has not seen this size before
    assert run(model, x, seed=5).loss == result.loss


def test_reentrant_checkpoints_are_declined_and_others_are_not():
    x = torch.randn(4, 3, requires_grad=True)
    result = run(Returns(lambda y: checkpoint(torch.sin, y, use_reentrant=False)), x)
    assert result.grad_norm > 0
    with pytest.raises(CanaryDeclined, match="reentrant"):
        run(Returns(lambda y: checkpoint(torch.sin, y, use_reentrant=True)), x)


def test_a_model_that_talks_to_others_is_declined():
    with pytest.raises(CanaryDeclined, match="SyncBatchNorm"):
        run(nn.Sequential(nn.SyncBatchNorm(3)), torch.randn(4, 3))


def test_a_loss_alone_needs_no_gradient_and_leaves_nothing_behind():
    model, batch = make_model(), make_batch(0, 0)
    before = [replay.state_digest(model), generators()]
    kept = capture_batch((), batch).plain()
    assert replay.loss_without_gradient(model, kept, CPU, seed=1) == run(model, **batch).loss
    assert [replay.state_digest(model), generators()] == before


def test_all_workers_take_the_same_algorithms_of_cudnn(monkeypatch):
    wanted = True
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", wanted)
    model, seen = nn.Linear(3, 3), []
    model.register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.benchmark))
    batch = capture_batch((torch.ones(2, 3),), {}).plain()
    replay.run_batch(model, batch, torch.device("cpu"), seed=1)
    assert seen == [False]
    assert torch.backends.cudnn.benchmark is wanted
