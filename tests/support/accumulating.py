"""Trainings under FSDP2 and DDP that accumulate, healthy ones and such that change their sums."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from support.loops import bits_of, watch

MICRO = 3


class Net(nn.Module):
    def __init__(self, num_layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(num_layers))
        self.gate = nn.Linear(8, 1)  # one row: most ranks hold none of it
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x, *, scaled=True):
        for layer in self.layers:
            x = x + layer(x).tanh()
        x = x * self.gate(x).sigmoid()
        return x * self.scale if scaled else x


class Waits:
    """A healthy training whose last micro-batch alone reduces."""

    steps, late, learnt = 6, 3, 0  # since when something is wrong, and how gradients are read known
    num_layers = 2
    reduces = False
    options = {}  # noqa: RUF012
    replicas = False

    def __init__(self, rank):
        torch.manual_seed(0)
        self.rank, self.net = rank, Net(self.num_layers)
        self.wrap()
        torch.manual_seed(1 + rank)

    def wrap(self):
        world = dist.get_world_size()
        mesh = init_device_mesh("cpu", (world,))
        if self.replicas:
            mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicas", "shards"))
        for layer in self.net.layers:
            fully_shard(layer, mesh=mesh, **self.options)
        self.model = fully_shard(self.net, mesh=mesh, **self.options)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def synchronise(self, *, on):
        self.model.set_requires_gradient_sync(on)

    def num_micro(self, step):
        return MICRO

    def loss(self, step, micro):
        output = self.model(torch.randn(4, 8))
        return output.float().square().mean() / MICRO

    def after_pass(self, step, micro): ...

    def before_pass(self, step, micro): ...

    def reduced(self, step): ...

    def zero(self, step):
        self.optimizer.zero_grad()

    def gradients(self):
        kept = self.sharded if self.reduces else list(self.net.parameters())
        return (p.grad for p in kept if p.grad is not None)

    @property
    def sharded(self):
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def train(self, run_dir):
        """Return this rank's part of the parameters' bits; without a directory, train alone."""
        with watch(self.model, self.optimizer, run_dir=run_dir, canary=False):
            for step in range(self.steps):
                count = self.num_micro(step)
                for micro in range(count):
                    self.synchronise(on=self.reduces or micro == count - 1)
                    loss = self.loss(step, micro)
                    if micro and step >= self.late:
                        self.before_pass(step, micro)
                    loss.backward()
                    if micro < count - 1 and step >= self.late:
                        self.after_pass(step, micro + 1)
                self.reduced(step)
                self.optimizer.step()
                self.zero(step)
        return bits_of(self.net)


class Reduces(Waits):
    reduces = True


class WaitsClipped(Waits):
    def reduced(self, step):
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1e-3)


class ReducesClipped(WaitsClipped):
    reduces = True


BF16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}


class WaitsInBF16(Waits):
    options = BF16


class WaitsUnsharded(Waits):
    def wrap(self):
        super().wrap()
        self.model.set_reshard_after_backward(False)


class ReducesOffloaded(Reduces):
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}  # noqa: RUF012


class WaitsInShorterWindows(Waits):
    def num_micro(self, step):
        return (3, 1, 2)[step % 3]


class AlwaysOne(Waits):
    def num_micro(self, step):
        return 1


class ZeroedInPlace(AlwaysOne):
    def zero(self, step):
        self.optimizer.zero_grad(set_to_none=False)


class WaitsWithAPenalty(Waits):
    """Other gradients are taken in passes that accumulate nothing; the last one's reduces."""

    def loss(self, step, micro):
        x = torch.randn(4, 8, requires_grad=True)
        loss = self.model(x).square().mean()
        [gradient] = torch.autograd.grad(loss, [x], retain_graph=True)
        return loss + gradient.sum()


class WaitsWithAScaleOutsideLater(Waits):
    """A parameter of the root is reached before what the model returned, later alone."""

    def loss(self, step, micro):
        output = self.model(torch.randn(4, 8), scaled=False)
        return (output * self.net.scale if micro else output).square().mean()


class ReducesWithDecayInTheLoss(Reduces):
    """The loss uses the sharded parameters themselves."""

    def loss(self, step, micro):
        decay = sum(p.to_local().square().sum() for p in self.sharded)
        return super().loss(step, micro) + 1e-3 * decay


class SharpnessAware(Waits):
    """The first pass only tells where the second one computes its gradient."""

    def num_micro(self, step):
        return 2

    def climb(self):
        with torch.no_grad():
            for parameter in self.sharded:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=1e-3)
        self.optimizer.zero_grad()


class ReducesSharpnessAware(SharpnessAware, Reduces):
    def loss(self, step, micro):
        loss = super().loss(step, micro)
        if micro:
            self.climb()
        return loss


class WaitsResetInPlace(WaitsUnsharded):
    def after_pass(self, step, micro):
        if micro == 2:
            self.net.zero_grad(set_to_none=False)


class ReducesDivided(Reduces):
    def before_pass(self, step, micro):
        for gradient in self.gradients():
            gradient.div_(MICRO)


class ReplicasDivided(ReducesDivided):
    replicas = True


class ReducesOneLayer(Reduces):
    def before_pass(self, step, micro):
        if micro == 2:
            self.sharded[1].grad.zero_()


class ReducesDoubledByOne(Reduces):
    def before_pass(self, step, micro):
        if self.rank == 1 and micro == 1:
            for gradient in self.gradients():
                gradient.mul_(2)


class ReducesChangedAfterwards(ReducesClipped):
    def reduced(self, step):
        super().reduced(step)
        if self.rank and step >= self.late:
            self.sharded[2].grad.mul_(3)


class UnderDDP(Waits):
    """Has so many layers that most hooks can be spared."""

    steps, late, learnt = 8, 4, 4
    num_layers = 9

    def wrap(self):
        self.model = DistributedDataParallel(self.net, **self.options)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def synchronise(self, *, on):
        self.model.require_backward_grad_sync = on


class DDPInBuckets(UnderDDP):
    options = {"gradient_as_bucket_view": True}  # noqa: RUF012

    def zero(self, step):
        self.optimizer.zero_grad(set_to_none=False)


class DDPPreparedLate(UnderDDP):
    """All forward passes are inside no_sync; the training prepares the reduction after the last."""

    def loss(self, step, micro):
        with self.model.no_sync():
            loss = super().loss(step, micro)
        if micro == MICRO - 1:
            self.model.require_forward_param_sync = True
            self.model.reducer.prepare_for_backward([])
        return loss


class DDPReducedElsewhere(DDPPreparedLate):
    """Its communication hook leaves gradients alone; the training reduces them later."""

    def wrap(self):
        super().wrap()
        self.model.register_comm_hook(None, leave)

    def reduced(self, step):
        for gradient in self.gradients():
            dist.all_reduce(gradient)
            gradient.div_(dist.get_world_size())


def leave(state, bucket):
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class DDPInShorterWindows(UnderDDP, WaitsInShorterWindows):
    pass


class DDPAlwaysOne(UnderDDP, AlwaysOne):
    pass


class DDPWithAScaleOutside(UnderDDP):
    """The backward pass reaches a parameter before it reaches what the model returned."""

    def loss(self, step, micro):
        output = self.model(torch.randn(4, 8), scaled=False)
        return (output * self.net.scale).square().mean()


class DDPSharpnessAware(UnderDDP, SharpnessAware):
    def loss(self, step, micro):
        if micro:
            self.climb()
        return super().loss(step, micro)


class DDPResetInPlace(DDPInBuckets):
    def before_pass(self, step, micro):
        if micro == 2:
            self.optimizer.zero_grad(set_to_none=False)


class DDPDoubledBehindAutograd(UnderDDP):
    def before_pass(self, step, micro):
        for gradient in self.gradients():
            gradient.data.mul_(2)  # its version stays


class DDPOneLayer(UnderDDP):
    def before_pass(self, step, micro):
        if micro == 2:
            self.net.layers[5].weight.grad.zero_()


class DDPLeftOver(DDPAlwaysOne):
    steps = 13

    def zero(self, step):
        if step % 4 != 3:
            self.optimizer.zero_grad()


class DDPLayerChangedAfterwards(DDPAlwaysOne):
    steps = 13

    def reduced(self, step):
        for parameter in self.net.layers[2].parameters() if step >= self.late else ():
            parameter.grad.mul_(3)


ABSTRACT = (
    *("Waits", "WaitsClipped", "WaitsUnsharded", "AlwaysOne", "SharpnessAware", "Reduces"),
    *("ReducesDivided", "UnderDDP"),
)
"""Those of which only a derived one is trained."""


def cases(base):
    found = {} if base.__name__ in ABSTRACT else {base.__name__: base}
    for each in base.__subclasses__():
        found |= cases(each)
    return found


HEALTHY = (
    *("WaitsInBF16", "WaitsInShorterWindows", "WaitsWithAPenalty", "WaitsWithAScaleOutsideLater"),
    *("ReducesClipped", "ReducesOffloaded", "ReducesWithDecayInTheLoss", "ReducesSharpnessAware"),
    *("ZeroedInPlace", "DDPReducedElsewhere", "DDPInShorterWindows", "DDPAlwaysOne"),
    *("DDPInBuckets", "DDPPreparedLate", "DDPWithAScaleOutside", "DDPSharpnessAware"),
)

COMPARED = (
    *("WaitsInShorterWindows", "WaitsWithAPenalty", "WaitsWithAScaleOutsideLater"),
    *("ReducesClipped", "ReducesOffloaded", "ZeroedInPlace"),
)
"""Trained without the monitor, too: what follows on the others is the same code."""
