"""A canary on one worker: batches that are kept, and a run that leaves nothing behind."""

import enum
import itertools
import random
from collections import OrderedDict, deque, namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from rankscope.bus.packing import PlainBatch, pack_batch, unpack_batch
from rankscope.evidence.canary.batch import (
    MAX_BATCH_BYTES,
    CanaryDeclined,
    capture_batch,
    restore_batch,
    samples_of,
)
from rankscope.evidence.canary.replay import (
    PendingCanary,
    loss_of,
    loss_without_gradient,
    run_batch,
    state_digest,
)
from support.models import make_batch, make_model

CPU = torch.device("cpu")


def there_and_back(*args, **kwargs):
    """Return arguments that were kept, packed, unpacked and brought back."""
    batch = unpack_batch(pack_batch(capture_batch(args, kwargs).plain()))
    return restore_batch(batch, CPU)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -(2**70),
        0.1,
        float("inf"),
        "text",
        [],
        (1, [2.5, {"a": (None,)}]),
        {1: "one", "two": 2, (3, 4): [5]},
        OrderedDict(a=1),
    ],
)
def test_plain_values_come_back_as_they_were(value):
    (back,), kwargs = there_and_back(value, named=value)
    assert back == value
    assert kwargs == {"named": value}
    assert type(back) is (dict if isinstance(value, dict) else type(value))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.complex64,
        torch.int64,
        torch.uint8,
        torch.bool,
    ],
)
def test_tensors_of_all_types_keep_their_bits(dtype):
    tensor = torch.arange(12).reshape(3, 4).to(dtype).t()
    (back,), _ = there_and_back(tensor)
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    bits = (t.contiguous().view(torch.uint8) for t in (tensor, back))
    assert torch.equal(*bits)


def test_odd_tensors_come_back_too():
    scalar, empty = torch.tensor(2.5), torch.empty(0, 3)
    conjugate = torch.tensor([1 + 2j]).conj()
    (one, two, three, four), _ = there_and_back(scalar, empty, conjugate, np.arange(3.0)[::2])
    assert (one.item(), one.shape, two.shape) == (2.5, (), (0, 3))
    assert three.tolist() == [1 - 2j]
    assert four.tolist() == [0, 2]


class Mode(str, enum.Enum):  # noqa: UP042 - as models still write it
    TRAIN = "train"


class Level(enum.IntEnum):
    HIGH = 3


class Rate(float, enum.Enum):
    LOW = 0.1


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Mode.TRAIN, str),
        (Level.HIGH, int),
        (Rate.LOW, float),
        (np.float64(0.1), np.float64),
        (np.float32(0.1), np.float32),
        (np.int64(3), np.int64),
        (np.bool_(True), np.bool_),
        (np.str_("text"), np.str_),
    ],
)
def test_members_of_enumerations_and_scalars_of_numpy_keep_their_value(value, kind):
    (back, again), _ = there_and_back(value, {value: value})
    assert back == value
    assert type(back) is kind
    assert again == {value: value}


class Fresh(dict):
    """Makes its values when it is asked for them."""

    def items(self):
        return ((key, torch.full((3,), key)) for key in self)


def test_tensors_that_nobody_else_holds_are_not_mistaken_for_each_other():
    (back,), _ = there_and_back(Fresh.fromkeys(range(9)))
    assert [value.tolist() for value in back.values()] == [[key] * 3 for key in range(9)]


def test_a_tensor_that_is_given_twice_stays_one():
    ids = torch.arange(3)
    _, back = there_and_back(input_ids=ids, labels=ids, other=ids.clone())
    assert back["input_ids"] is back["labels"]
    assert back["input_ids"] is not back["other"]


def test_what_is_kept_does_not_change_with_the_batch():
    ids = torch.arange(3)
    captured = capture_batch((ids,), {})
    ids.zero_()
    (back,), _ = restore_batch(captured.plain(), CPU)
    assert back.tolist() == [0, 1, 2]


class Colour(enum.Enum):
    RED = 1


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (object(), "object"),
        ({1, 2}, "set"),
        (Pair(1, 2), "Pair"),
        (Colour.RED, "Colour"),
        (torch.eye(2).to_sparse(), "sparse"),
        (np.array([None]), "object"),
        ([lambda: 0], "function"),
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


def test_samples_are_cut_out_of_a_batch():
    batch = capture_batch((), make_batch(0, 0) | {"scale": torch.tensor(2.0)}).plain()
    parts = samples_of(batch)
    assert [part.samples.tolist() for part in parts] == [[s] for s in batch.samples.tolist()]
    assert [array.shape for array in parts[1].arrays] == [(1, 5), (1, 5), ()]
    assert parts[1].arrays[0].tolist() == [make_batch(0, 0)["input_ids"][1].tolist()]
    assert samples_of(capture_batch((), {"x": 3}).plain()) == []
    assert samples_of(PlainBatch(batch.structure, batch.arrays, np.arange(1_000_000))) == []


TENSOR = {"tensor": 0, "dtype": "float32", "host": True}
DEEP: list[object] = []
for _ in range(5000):
    DEEP = [{"list": DEEP}]


@pytest.mark.parametrize(
    "value",
    [
        *({**TENSOR, "tensor": index} for index in (-1, 1, 10**30, True, 0.0, "0", [0], None)),
        *({**TENSOR, "dtype": name} for name in ("int32", "float64", "nn", "none", 3)),
        *({"array": index, "scalar": False} for index in (-1, 1, 10**30)),
        *({"tensor": 0}, {"array": 0}, {}, {"list": [], "tuple": []}, {"other": 1}, {"list": 3}),
        *({"float": "x"}, {"float": 3}, {"dict": [1]}, {"dict": [[{"list": []}, 1]]}),
        {"list": DEEP},
    ],
)
def test_structures_that_are_none_are_declined(value):
    structure = {"tuple": [{"tuple": [value]}, {"dict": []}]}
    batch = PlainBatch(structure, (np.ones((2, 2), np.float32),))
    with pytest.raises(CanaryDeclined, match="cannot be brought back"):
        restore_batch(batch, CPU)


@pytest.mark.parametrize("structure", [None, 3, {"tuple": []}, {"tuple": [3, {"dict": []}]}])
def test_arguments_that_are_none_are_declined(structure):
    with pytest.raises(CanaryDeclined, match="cannot be brought back"):
        restore_batch(PlainBatch(structure, ()), CPU)


# The run --------------------------------------------------------------------------------------


def generators() -> tuple[object, ...]:
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002
    state = numpy["state"]["key"].tobytes(), numpy["state"]["pos"]
    return random.getstate(), state, torch.get_rng_state().tolist()


def run(model, *args, seed=1, **kwargs):
    return run_batch(model, capture_batch(args, kwargs).plain(), CPU, seed=seed).read()


def test_loss_and_gradient_are_those_of_the_batch():
    model, batch = make_model(dropout=0.0), make_batch(0, 0)
    result = run(model, **batch)
    loss = model(**batch)["loss"]
    loss.backward()
    norm = torch.cat([p.grad.flatten().double() for p in model.parameters()]).norm()
    assert result.loss == loss.item()
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-6)


def test_equal_models_agree_in_every_bit_and_unequal_ones_do_not():
    model, other, batch = make_model(3), make_model(3), make_batch(0, 0)
    torch.manual_seed(77)  # generators stand elsewhere now
    assert run(model, **batch) == run(other, **batch)
    assert run(model, **batch, seed=2) != run(model, **batch)  # another dropout
    assert state_digest(model) == state_digest(other)
    with torch.no_grad():
        other.head.bias[4] += 1e-5
    assert run(model, **batch).digest != run(other, **batch).digest


def test_the_state_of_a_model_has_another_digest_when_any_tensor_of_it_changes():
    model = nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(20)))
    digests = [state_digest(model)]
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data += 1
        digests.append(state_digest(model))
    assert len(set(digests)) == 1 + 20 * 5


@pytest.mark.parametrize("arrived", list(itertools.product([False, True], repeat=3)))
def test_a_canary_can_be_read_once_all_its_results_have_arrived(arrived):
    results = tuple(SimpleNamespace(ready=one) for one in arrived)
    assert PendingCanary(0, 1, results).ready == all(arrived)


class SideEffects(nn.Module):
    """A forward pass that changes whatever it can reach."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Dropout(0.5).eval()
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("expanded", torch.zeros(1).expand(4))
        self.kept = torch.zeros(2)
        self.calls, self.seen, self.last = 0, deque([1], maxlen=2), {"x": None}
        self.names = {"first"}
        self.noise = torch.Generator().manual_seed(5)

    def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        self.counter += 1
        self.replaced = self.replaced + torch.rand(2)
        self.kept += random.random() + np.random.rand()  # noqa: NPY002
        self.calls += 1
        self.seen.append(self.calls)
        self.last["x"] = x
        self.names.add("second")
        self.invented = x
        self.new_buffer = None
        self.frozen.train()
        x.add_(1)
        noisy = self.layer(x) + torch.rand((), generator=self.noise)
        if fail:
            raise RuntimeError("in the middle")
        return self.norm(noisy)


def everything(model: SideEffects) -> dict[str, object]:
    return {
        "objects": {name: id(value) for name, value in vars(model).items()},
        "buffers": {name: id(value) for name, value in model._buffers.items()},
        "bits": {name: value.tolist() for name, value in model.state_dict().items()},
        "versions": [t._version for t in (*model.parameters(), *model.buffers(), model.kept)],
        "kept": model.kept.tolist(),
        "seen": list(model.seen),
        "last": dict(model.last),
        "names": set(model.names),
        "calls": model.calls,
        "noise": model.noise.get_state().tolist(),
        "training": [part.training for part in model.modules()],
        "gradients": [None if p.grad is None else p.grad.tolist() for p in model.parameters()],
        "generators": generators(),
    }


@pytest.mark.parametrize("fail", [False, True])
def test_whatever_a_forward_pass_changes_is_put_back(fail):
    model = SideEffects()
    model(torch.randn(4, 3)).square().sum().backward()
    before, hooks = everything(model), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hooks.append)
    if fail:
        with pytest.raises(CanaryDeclined, match="RuntimeError: in the middle"):
            run(model, torch.randn(4, 3), fail=True)
        before["generators"] = generators()  # the batch above was drawn from them
    else:
        batch = capture_batch((torch.ones(4, 3),), {}).plain()
        first = run_batch(model, batch, CPU, seed=3).read()
        assert run_batch(model, batch, CPU, seed=3).read() == first
    after = everything(model)
    assert {name for name in after if after[name] != before[name]} == set()
    assert hooks == []


def test_a_graph_that_waits_for_its_backward_pass_still_works():
    model = SideEffects()
    x = torch.randn(4, 3)
    model(x.clone())
    waiting = (model.layer(x) * model.kept.repeat(2)[:3]).sum() + model.norm(x).sum()
    run(model, torch.ones(4, 3))
    waiting.backward()
    assert model.layer.weight.grad is not None


def test_autocast_is_that_of_the_training_and_its_cache_is_left_alone():
    model, batch = make_model(dropout=0.0), make_batch(0, 0)
    plain = run(model, **batch)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = run(model, **batch)
        again = model(**batch)["loss"]
    assert mixed.loss == again.item()
    assert mixed.loss != plain.loss
    again.backward()


def test_a_compiled_model_is_run_as_it_is_written():
    model, batch = make_model(), make_batch(0, 0)
    compiled = torch.compile(model, backend="eager")
    assert run(compiled, **batch) == run(model, **batch)


class Attending(nn.Linear):
    """Attends by an operator of higher order, whose backward pass no CPU knows."""

    def forward(self, x):
        hidden = super().forward(x)
        attended = flex_attention(*[hidden.detach()[None, None]] * 3)
        return (hidden * attended).mean()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_operators_of_higher_order_are_run():
    model, x = Attending(16, 16), torch.randn(8, 16)
    assert run(model, x).loss == model(x).item()


def test_a_frozen_parameter_stays_out_of_it():
    model, batch = make_model(), make_batch(0, 0)
    whole = run(model, **batch)
    model.embedding.requires_grad_(False)
    part = run(model, **batch)
    assert part.loss == whole.loss
    assert part.grad_norm < whole.grad_norm


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


@pytest.mark.parametrize("make", [lambda y: y.argmax(1), lambda y: None, lambda y: "text"])
def test_a_model_that_returns_nothing_to_derive_is_declined(make):
    with pytest.raises(CanaryDeclined, match="returns no loss"):
        run(Returns(make), torch.randn(2, 3))


def test_a_loss_per_sample_is_averaged():
    assert loss_of({"loss": torch.tensor([1.0, 3.0])}).item() == 2


def test_reentrant_checkpoints_are_declined_and_others_are_not():
    x = torch.randn(4, 3, requires_grad=True)
    result = run(Returns(lambda y: checkpoint(torch.sin, y, use_reentrant=False)), x)
    assert result.grad_norm > 0
    with pytest.raises(CanaryDeclined, match="reentrant"):
        run(Returns(lambda y: checkpoint(torch.sin, y, use_reentrant=True)), x)


def test_a_model_that_talks_to_others_is_declined():
    with pytest.raises(CanaryDeclined, match="SyncBatchNorm"):
        run(nn.Sequential(nn.SyncBatchNorm(3)), torch.randn(4, 3))


def test_a_batch_of_the_wrong_shape_is_declined():
    with pytest.raises(CanaryDeclined, match="could not be run"):
        run(make_model(), input_ids=torch.zeros(2, 3))


def test_a_loss_alone_needs_no_gradient_and_leaves_nothing_behind():
    model, batch = make_model(), make_batch(0, 0)
    before = [state_digest(model), generators()]
    kept = capture_batch((), batch).plain()
    loss = loss_without_gradient(model, kept, CPU, seed=1)
    assert loss == run(model, **batch).loss
    assert [state_digest(model), generators()] == before


@pytest.mark.parametrize("wanted", [True, False])
def test_all_workers_take_the_same_algorithms_of_cudnn(wanted, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", wanted)
    model, seen = nn.Linear(3, 3), []
    model.register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.benchmark))
    batch = capture_batch((torch.ones(2, 3),), {}).plain()
    run_batch(model, batch, torch.device("cpu"), seed=1)
    assert seen == [False]
    assert torch.backends.cudnn.benchmark is wanted
