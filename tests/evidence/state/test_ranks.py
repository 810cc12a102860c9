import copy
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import rankscope
from rankscope import Run, Severity
from rankscope.evidence.state.rare import adapted_matrices
from rankscope.wrappers.living import frozen_modules, living_modules
from support.loops import collect_warnings, train_watched
from support.ranks import on_ranks, run_ranks


class Adapted(nn.Module):
    def __init__(self, layer, rank=2):
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, layer.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class AdaptedModel(nn.Module):
    def __init__(self, trained=()):
        super().__init__()
        self.embed = nn.Linear(6, 8).requires_grad_(False)
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.out = nn.Linear(8, 6)
        self.requires_grad_(False)
        self.q, self.k = Adapted(self.q), Adapted(self.k)
        for name in trained:
            self.get_parameter(name).requires_grad_()

    def forward(self, x):
        hidden = self.embed(x)
        return self.out(self.q(hidden) * self.k(hidden)).square().mean()


def found_in(model, held=None):
    parameters = dict(model.named_parameters())
    trained = [name for name, p in parameters.items() if p.requires_grad]
    return adapted_matrices(parameters, trained if held is None else held(trained))


def test_a_trained_base_is_named_whatever_the_form_of_its_adapter():
    assert found_in(AdaptedModel(["k.base_layer.weight", "out.weight"])) == ["k.base_layer.weight"]

    class Experts(nn.Module):  # factors the other way round, and no modules of their own
        def __init__(self):
            super().__init__()
            self.up = nn.Parameter(torch.randn(6, 12))
            self.lora_in = nn.Parameter(torch.randn(6, 2))
            self.lora_out = nn.Parameter(torch.zeros(2, 12))
            self.router = nn.Parameter(torch.randn(6, 3), requires_grad=False)

    assert found_in(nn.ModuleDict({"a": Experts()})) == ["a.up"]


@pytest.mark.parametrize(
    "model",
    [
        AdaptedModel(),
        AdaptedModel(["out.weight", "embed.weight", "q.base_layer.bias"]),  # saved modules, biases
        AdaptedModel().requires_grad_(True),  # nothing is frozen
        nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4), nn.Linear(4, 4)),
    ],
)
def test_what_trains_on_purpose_is_not_named(model):
    if isinstance(model, nn.Sequential):
        nn.init.zeros_(model[2].weight)  # a layer that begins at zero, of full rank
    assert found_in(model) == []


def test_a_base_that_the_optimizer_does_not_hold_or_an_adapter_that_has_learned_is_not_named():
    model = AdaptedModel(["k.base_layer.weight"])
    assert found_in(model, lambda names: [n for n in names if "base" not in n]) == []
    nn.init.ones_(model.k.lora_B["default"].weight)
    assert found_in(model) == []


def make_teacher(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).requires_grad_(False)


def test_only_outermost_modules_of_ordinary_frozen_tensors_count():
    teacher, trained = make_teacher(0), nn.Linear(2, 2)
    holder = nn.ModuleList([trained, teacher])
    meta = nn.Linear(2, 2, device="meta").requires_grad_(False)
    ours = {id(each) for each in (teacher, *teacher, trained, holder, meta)}
    assert [id(m) for m in frozen_modules(living_modules(set())) if id(m) in ours] == [id(teacher)]
    inside = {id(part) for part in teacher.modules()}
    assert [id(m) for m in frozen_modules(living_modules(inside)) if id(m) in ours] == []


STEPS = 12


class Counting(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.register_buffer("counts", torch.zeros(8, dtype=kind))
        self.register_buffer("sums", torch.zeros(4))
        self.register_buffer("places", torch.arange(0.0, 600.0))

    def forward(self, tokens):
        hidden = self.embed(tokens)
        self.counts += torch.bincount(tokens.flatten(), minlength=8).to(self.counts.dtype)
        self.sums += 1000 * hidden.detach().sum((0, 1)).abs()
        return hidden.square().mean()


def counting(rank, kind):
    model = DistributedDataParallel(Counting(kind).bfloat16(), broadcast_buffers=False)
    return model, lambda step: model(torch.randint(8, (4, 90)))


@contextmanager
def kept(module):
    before = [buffer.clone() for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, old in zip(module.buffers(), before, strict=True):
            buffer.copy_(old)


class Checkpointed(nn.Module):
    def __init__(self, keeps):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.second = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.keeps = keeps

    def forward(self, x):
        contexts = lambda: (nullcontext(), kept(self.first) if self.keeps else nullcontext())  # noqa: E731
        x = checkpoint(self.first, x, use_reentrant=False, context_fn=contexts)
        return self.second(x).square().mean()


def recomputed(rank, keeps):
    model = DistributedDataParallel(Checkpointed(keeps))

    def loss_of(step):
        (model(torch.randn(4, 4)) / 2).backward()  # the first of two micro-batches
        return model(torch.randn(4, 4)) / 2

    return model, loss_of


def drawn_in_shards(rank, seed):
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)))
    torch.manual_seed(seed(rank))
    with torch.no_grad():
        for layer in model[:2]:
            layer.weight.to_local().normal_()
            layer.bias.to_local().zero_()
    return model, lambda step: model(torch.randn(4, 8)).square().mean()


def adapted(wrap, rank, trained):
    model = wrap(AdaptedModel(trained))
    return model, lambda step: model(torch.randn(4, 6))


def beside_teachers(rank, seed):
    student = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    beside = [
        make_teacher(seed(rank)),
        make_teacher(3).append(nn.Dropout()).append(nn.Linear(6, 1)).requires_grad_(False),
        nn.Linear(rank + 2, 2).requires_grad_(False),  # of another size on each rank
        copy.deepcopy(student),  # on all of them, and trained
        make_teacher(seed(rank)).append(nn.Linear(6, 2)).requires_grad_(True),
        make_teacher(rank).append(nn.Linear(6, 3)).requires_grad_(True),  # nobody calls it
    ]
    beside[1].train(seed(rank) == 8)
    model = DistributedDataParallel(student)

    def loss_of(step):
        with torch.no_grad():
            bias = beside[4](torch.ones(6)).sum()
        return (model(torch.randn(4, 6)) - beside[1](torch.ones(6)) - bias).square().mean()

    return model, loss_of


BASE = ["k.base_layer.weight"]
RESTING = ["Sequential (84 elements)", "Sequential (98 elements)"]
ADAPTED = ("state.adapted_trains", BASE)
CASES = {  # the cause, what it names, the training, and what makes that faulty, and healthy
    "rounded": (
        *("state.counts_rounded", ["counts in bfloat16"], counting),
        *(torch.float32, torch.int64),  # the model's cast spares whole numbers
    ),
    "twice": ("state.statistics_twice", ["first.1"], recomputed, False, True),
    "alike": (
        *("state.shards_alike", ["0.weight", "1.weight"], drawn_in_shards),
        *(lambda rank: 1, lambda rank: 1 + rank),
    ),
    "adapted": (*ADAPTED, partial(adapted, DistributedDataParallel), BASE, []),
    "adapted in shards": (*ADAPTED, partial(adapted, fully_shard), BASE, []),
    "frozen": (
        *("state.frozen_differ", RESTING, beside_teachers),
        *(lambda rank: 7 + rank, lambda rank: 7),
    ),
}


def train_all(rank, folder):
    for name, (*_, make, faulty, healthy) in CASES.items():
        for how, path in ((faulty, name), (healthy, f"{name}, healthy")):
            torch.manual_seed(0)
            model, loss_of = make(rank, how)
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=0.01)
            torch.manual_seed(1 + rank)
            train_watched(model, optimizer, f"{folder}/{path}", STEPS, loss_of)


runs = on_ranks(train_all, 2)


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_a_warning_that_names_its_tensors_and_its_twin_has_none(runs, name):
    cause, names, *_ = CASES[name]
    found, healthy = (
        [one for one in Run.open(runs[1] / path).findings() if one.cause == cause]
        for path in (name, f"{name}, healthy")
    )
    assert healthy == []
    [fault] = found
    assert fault.severity is Severity.WARNING
    assert [named.partition(", number")[0] for named in fault.evidence["names"]] == names


@pytest.mark.ranks
def test_a_teacher_in_training_mode_on_one_rank_is_named(runs):
    of_each = [Run.open(runs[1] / path).findings() for path in ("frozen", "frozen, healthy")]
    said = [[f.explanation for f in of if f.cause == "compute.modes_differ"] for of in of_each]
    assert "Sequential (91 elements) (evaluation on rank 0, training on rank 1)" in said[0][0]
    assert said[1] == []


class Seeing(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += x.detach().mean()
        return x


def convolutional(*, counting):
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
        Seeing() if counting else nn.Identity(),
    )


NORMALISED = {
    "while accumulating and evaluating": None,
    "with a buffer of another kind": "9.seen",
    "with broadcasts that send nothing": "1.running_mean",
    "without broadcasts": None,
}
"""Ways to train with batch normalisation, and what differs where it should not."""


def _normalise_on_rank(rank, folder):
    told = {}
    for name in NORMALISED:
        model = convolutional(counting="a buffer" in name)
        options = {"broadcast_buffers": False} if name == "without broadcasts" else {}
        ddp = DistributedDataParallel(model, **options)
        if "send nothing" in name:
            ddp._sync_module_buffers = lambda authoritative_rank: None
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        warnings = collect_warnings()
        torch.manual_seed(rank)
        scope = rankscope.watch(ddp, optimizer, run_dir=f"{folder}/{name}", canary=False)
        for step in range(16):
            share = 1.0
            if "accumulating" in name:
                share = 0.5
                with ddp.no_sync():
                    (ddp(torch.randn(4, 3, 6, 6)).square().mean() * share).backward()
            (ddp(torch.randn(4, 3, 6, 6)).square().mean() * share).backward()
            optimizer.step()
            optimizer.zero_grad()
            if "evaluating" in name and step % 3 == 2:
                ddp.eval()
                with torch.no_grad():
                    ddp(torch.randn(4, 3, 6, 6))
                ddp.train()
        scope.close()
        told[name] = warnings
    return told


@pytest.mark.ranks
def test_running_statistics_may_drift_apart_between_two_broadcasts(tmp_path):
    for warnings in run_ranks(_normalise_on_rank, 2, str(tmp_path), timeout=240):
        assert warnings == {name: [] for name in NORMALISED}
    for name, wrong in NORMALISED.items():
        findings = {finding.id: finding for finding in Run.open(tmp_path / name).findings()}
        error = findings.pop("state.buffers_differ", None)
        assert (error is None) == (wrong is None), name
        if error is not None:
            assert error.severity is Severity.ERROR
            assert wrong in error.evidence["names"][0]
        assert [one.id for one in findings.values() if one.severity > Severity.NOTE] == []
        assert "running-statistics" in findings, name
