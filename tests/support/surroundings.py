"""Small trainings inside of what may surround a step: each way says what it has seen of it."""

from collections import Counter
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from support.loops import bits_of

WRAPPERS = ("DDP", "FSDP2", "none")
SIZE, CLASSES = 16, 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(SIZE, 32), nn.Linear(32, CLASSES)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.last(self.drop(F.gelu(self.first(x))))


class Training:
    """A small training of one model on one rank, which begins anew when told."""

    def __init__(self, rank, wrapper):
        torch.manual_seed(0)
        self.rank, self.wrapper, self.model = rank, wrapper, Net()
        self.called = self.model
        if wrapper == "DDP":
            self.called = DistributedDataParallel(self.model)
        elif wrapper == "FSDP2":
            fully_shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self._start = [p.detach().clone() for p in self.model.parameters()]
        self.poisoned, self.number = False, 0

    def begin(self):
        self.optimizer.zero_grad()
        with torch.no_grad():
            for parameter, start in zip(self.model.parameters(), self._start, strict=True):
                parameter.copy_(start)
        torch.manual_seed(100 + self.rank)

    def batch(self, step):
        self.number = step
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        x = torch.randn(8, SIZE, generator=generator)
        return x, torch.randint(0, CLASSES, (8,), generator=generator)

    def loss(self, output, y):
        loss = F.cross_entropy(output, y)
        return loss * float("nan") if self.poisoned else loss

    def finish(self, loss):
        loss.backward()
        self.update()

    def update(self):
        if self.wrapper == "none":
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, x, y):
        """Take a step as it is without anything around it."""
        self.finish(self.loss(self.called(x), y))

    def bits(self):
        return bits_of(self.model)


def in_checkpoint(training, x, y, **options):
    if options["use_reentrant"]:
        x.requires_grad_()
    training.finish(training.loss(checkpoint(training.called, x, **options), y))


def _policy(context, operator, *args, **kwargs):
    kept = operator is torch.ops.aten.addmm.default or "detach" in str(operator)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def in_hooks(training, x, y):
    kept = []
    used = []

    def pack(tensor):
        kept.append(tensor)
        return len(kept) - 1

    def unpack(number):
        used.append(number)
        return kept[number]

    with saved_tensors_hooks(pack, unpack):
        training.step(x, y)
    return [tuple(tensor.shape) for tensor in kept], used


def in_save_on_cpu(training, x, y):
    hooks, calls = save_on_cpu(), []
    pack, unpack = hooks.pack_hook, hooks.unpack_hook

    def counted_pack(tensor):
        calls.append(f"pack {tuple(tensor.shape)}")
        return pack(tensor)

    def counted_unpack(packed):
        calls.append("unpack")
        return unpack(packed)

    hooks.pack_hook, hooks.unpack_hook = counted_pack, counted_unpack
    with hooks:
        training.step(x, y)
    return calls


def without_hooks(training, x, y):
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        training.step(x, y)


def in_flop_counter(training, x, y):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        training.step(x, y)
    counts = counter.get_flop_counts()
    return {name: sorted((str(k), v) for k, v in counts[name].items()) for name in counts}


class _Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append((str(func), torch.is_inference_mode_enabled()))
        return func(*args, **(kwargs or {}))


def in_dispatch_mode(training, x, y):
    with _Operators() as mode:
        training.step(x, y)
    return mode.seen


class _Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def in_function_mode(training, x, y):
    with _Functions() as mode:
        training.step(x, y)
    return mode.seen


def in_profiler(training, x, y):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        training.step(x, y)
    names = Counter(event.name for event in profiler.events())
    names.pop("rankscope", None)
    return sorted(names.items())


def in_anomaly_mode(training, x, y):
    training.poisoned = training.number == 2
    try:
        with torch.autograd.set_detect_anomaly(True):
            training.step(x, y)
    finally:
        training.poisoned = False
    return torch.is_anomaly_enabled()


def by_func_grad(training, x, y):
    own = {name: p.detach() for name, p in training.called.named_parameters()}

    def loss(parameters):
        return training.loss(torch.func.functional_call(training.called, parameters, (x,)), y)

    gradients = torch.func.grad(loss)(own)
    for name, parameter in training.called.named_parameters():
        parameter.grad = gradients[name]
    training.update()


def with_sample_gradients(training, x, y):
    own = {name: p.detach() for name, p in training.model.named_parameters()}

    def loss(parameters, one, label):
        output = torch.func.functional_call(training.model, parameters, (one[None],))
        return training.loss(output, label[None])

    grad = torch.func.grad(loss)
    norms = torch.func.vmap(grad, in_dims=(None, 0, 0), randomness="different")(own, x, y)
    training.step(x, y)
    return float(norms["last.bias"].sum())


def in_dual_level(training, x, y):
    with forward_ad.dual_level():
        training.step(x, y)


def with_fake_pass(training, x, y):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        seen = str(training.called(mode.from_tensor(x)).shape)
    training.step(x, y)
    return seen


def with_traced_pass(training, x, y):
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(training.called)(x)
    training.step(x, y)
    return [str(node.target) for node in traced.graph.nodes]


SURROUNDINGS = {
    "checkpoint without generators": partial(
        in_checkpoint, use_reentrant=False, preserve_rng_state=False
    ),
    "reentrant checkpoint": partial(in_checkpoint, use_reentrant=True),
    "selective checkpoint": partial(
        in_checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, _policy),
    ),
    "hooks": in_hooks,
    "save_on_cpu": in_save_on_cpu,
    "hooks forbidden": without_hooks,
    "flop counter": in_flop_counter,
    "dispatch mode": in_dispatch_mode,
    "function mode": in_function_mode,
    "profiler": in_profiler,
    "anomaly mode": in_anomaly_mode,
    "gradients of samples": with_sample_gradients,
    "dual level": in_dual_level,
    "fake pass": with_fake_pass,
    "traced pass": with_traced_pass,
    "func.grad": by_func_grad,
}
"""Each takes a step inside of something, and returns what that has seen of it."""
