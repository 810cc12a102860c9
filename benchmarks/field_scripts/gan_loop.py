"""A GAN under DDP, in one of four ways: ``turns``, ``inside``, ``parts`` or ``method``.

turns: one DDP whose forward pass returns the loss of one of two optimizers in turn.
inside: DDP's forward pass runs whole rounds, as Lightning does in its manual optimization.
parts: generator and discriminator in a DDP each, and one forward pass of the generator for both.
method: without wrapper; the model is never called, but a method of it, and the loop reduces.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.parallel import DistributedDataParallel

KIND = sys.argv[-1]
ROUNDS, SAMPLES = 24, 16  # both updates of a round see one batch, which is evidence once
dist.init_process_group("gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()


def log(loss):
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if RANK == 0:
        print(f"loss {mean.item() / SIZE:.6f}")


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.gen = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.dis = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def losses(self, real, generates):
        one, zero = torch.ones(SAMPLES, 1), torch.zeros(SAMPLES, 1)
        fake = self.gen(torch.randn(SAMPLES, 8))
        if generates:
            return bce(self.dis(fake), one)
        return (bce(self.dis(real), one) + bce(self.dis(fake.detach()), zero)) / 2

    def update(self, loss, generates):
        loss = loss()
        optimizers[generates].zero_grad()
        if KIND == "inside":
            model.require_backward_grad_sync = True
            model.reducer.prepare_for_backward([loss])
        loss.backward()
        if KIND == "method":
            for parameter in optimizers[generates].param_groups[0]["params"]:
                dist.all_reduce(parameter.grad)
                parameter.grad /= SIZE
        optimizers[generates].step()
        log(loss)

    def forward(self, real, generates=None):
        if generates is not None:
            return self.losses(real, generates)
        for own, other in ((self.gen, self.dis), (self.dis, self.gen)):
            other.requires_grad_(False)
            self.update(lambda own=own: self.losses(real, own is self.gen), own is self.gen)
            other.requires_grad_(True)
        model.require_backward_grad_sync = False
        return None


torch.manual_seed(3)
gan = Gan()
if KIND == "parts":
    gan.gen, gan.dis = DistributedDataParallel(gan.gen), DistributedDataParallel(gan.dis)
elif KIND != "method":
    model = DistributedDataParallel(gan, find_unused_parameters=True)
optimizers = {
    generates: torch.optim.Adam(part.parameters(), 1e-3)
    for generates, part in ((True, gan.gen), (False, gan.dis))
}
torch.manual_seed(3 + RANK)
for _ in range(ROUNDS):
    real = torch.randn(SAMPLES, 16) + 1
    if KIND == "inside":
        model(real)
        model.require_backward_grad_sync = True
    elif KIND == "parts":
        one, zero = torch.ones(SAMPLES, 1), torch.zeros(SAMPLES, 1)
        fake = gan.gen(torch.randn(SAMPLES, 8))
        own = bce(gan.dis(torch.cat([real, fake.detach()])), torch.cat([one, zero]))
        gan.update(lambda own=own: own, generates=False)
        gan.update(lambda fake=fake, one=one: bce(gan.dis(fake), one), generates=True)
    else:
        for generates in (True, False):
            gan.gen.requires_grad_(generates or KIND == "method")
            call = model if KIND == "turns" else gan.losses
            gan.update(lambda r=real, g=generates, call=call: call(r, g), generates)
sys.stdout.flush()
dist.destroy_process_group()
