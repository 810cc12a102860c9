# ruff: noqa: D102
"""R71, Megatron-Bridge#5591: encoder and decoder each lower the loss scale at their own overflows.

NVIDIA-NeMo/Megatron-Bridge#5591: the modules of a model are on ranks of their own, each with an
optimizer and a loss scaler in float16. All skip a step in which one has overflowed, but only this
one lowers its scale. From then on, the decoder's ranks scale the loss by more than the encoder's
take out of its gradients.
Two ranks have a module each, four have two replicas of each; one process has both, and one scaler.
With --right, all scalers learn of each overflow.
"""

import torch
import torch.distributed as dist
from reports_layouts import begin, end, options, sum_over_ranks
from torch import Tensor, nn
from torch.nn import functional as F

GLOBAL_BATCH, INPUTS, WIDTH, CLASSES, LIMIT = 16, 24, 32, 10, 1.0

chosen = options()
rank, world = begin()
replicas = max(world // 2, 1)
has_encoder, has_decoder = rank < replicas, rank >= world - replicas
replica = rank % replicas
partner = (rank + replicas) % world


class Encoder(nn.Module):
    """Reads a spectrum, however loud it is."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(INPUTS, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, spectrum: Tensor) -> Tensor:
        hidden: Tensor = self.out(torch.tanh(self.norm(self.into(spectrum))))
        return hidden


class Decoder(nn.Module):
    """Classifies what the encoder made."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.inner(hidden)))
        return logits


class Scaler:
    """A dynamic loss scale."""

    def __init__(self, patience: int = 1000) -> None:
        self.scale, self.patience, self.good = 2.0**12, patience, 0

    def update(self, overflow: bool) -> None:
        self.good = 0 if overflow else self.good + 1
        if overflow:
            self.scale /= 2
        elif self.good % self.patience == 0:
            self.scale *= 2


def spectra(samples: int) -> tuple[Tensor, Tensor]:
    """Draw spectra around one of ten centres; one of eighty was recorded nearly silent."""
    draw = torch.Generator().manual_seed(1)
    kinds = torch.randint(CLASSES, (samples,), generator=draw)
    centres = torch.randn(CLASSES, INPUTS, generator=draw)
    drawn = centres[kinds] + torch.randn(samples, INPUTS, generator=draw)
    drawn[torch.rand(samples, generator=draw) < 1 / 80] *= 3e-6
    return drawn, kinds


def average(modules: nn.Module) -> None:
    """Average gradients over the replicas of a module."""
    for parameter in modules.parameters():
        if replicas > 1:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=groups[has_decoder])
            parameter.grad /= replicas


groups = (
    [dist.new_group(list(range(at, at + replicas))) for at in (0, replicas)] if world > 1 else []
)
encoder, decoder = Encoder(), Decoder()
model = nn.ModuleDict()
if has_encoder:
    model["encoder"] = encoder
if has_decoder:
    model["decoder"] = decoder
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
scaler = Scaler()
inputs, kinds = spectra(4096)
for step in range(chosen.steps):
    rows = torch.arange(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH).chunk(replicas)[replica]
    rows %= len(inputs)
    hidden = torch.zeros(len(rows), WIDTH, requires_grad=not has_encoder)
    if has_encoder:
        with torch.autocast("cpu", torch.float16):
            hidden = encoder(inputs[rows])
        if not has_decoder:
            dist.send(hidden.detach().float(), partner)
    if has_decoder:
        if not has_encoder:
            dist.recv(hidden.data, partner)
        with torch.autocast("cpu", torch.float16):
            logits = decoder(hidden)
        loss = F.cross_entropy(logits.float(), kinds[rows])
        (loss * scaler.scale).backward()  # type: ignore[no-untyped-call]
        if not has_encoder:
            assert hidden.grad is not None
            dist.send(hidden.grad, partner)
    elif has_encoder:
        back = torch.empty(len(rows), WIDTH)
        dist.recv(back, partner)
        hidden.backward(back.to(hidden.dtype))  # type: ignore[no-untyped-call]
        loss = torch.zeros(())
    average(model)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for gradient in gradients:
        gradient.div_(scaler.scale)
    own_overflow = torch.tensor(float(not all(g.isfinite().all() for g in gradients)))
    any_overflow = sum_over_ranks(own_overflow.clone())
    squares = sum_over_ranks(sum((g.square().sum() for g in gradients), torch.zeros(())))
    if not any_overflow:
        factor = (LIMIT / (squares / replicas).sqrt()).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)
        optimizer.step()
    optimizer.zero_grad()
    scaler.update(bool(any_overflow if chosen.right else own_overflow))
if world > 1:  # the first rank prints the loss and the sum of both modules
    mean = sum_over_ranks(loss.detach().clone() / replicas)
    for module, first in ((encoder, 0), (decoder, replicas)):
        for parameter in module.parameters():
            dist.broadcast(parameter.data, src=first)
    loss = mean
end(nn.ModuleList([encoder, decoder]), loss)
