"""A loop in the pattern of nanochat and modded-nanogpt: no wrapper, both optimizers reduce.

AdamW takes the mean of its slice of each parameter's gradient, keeps moments of that slice, and
gathers the parameter. Muon sends each matrix's mean gradient to the rank that updates it.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

VOCABULARY, CONTEXT, WIDTH = 64, 16, 32
dist.init_process_group("gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True, bias=False)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens, targets):
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        logits = 15 * torch.tanh(self.head(hidden) / 15)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class SlicedAdamW(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr, "betas": (0.8, 0.95), "eps": 1e-10, "decay": 0.01})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            reductions = []
            for parameter in group["params"]:
                shares = list(parameter.grad.chunk(SIZE))
                own = torch.empty_like(shares[RANK])
                work = dist.reduce_scatter(own, shares, async_op=True)
                reductions.append((parameter, own, work))
            for parameter, own, work in reductions:
                work.wait()
                gathered = self.update(parameter, own.div_(SIZE), group)
                dist.all_gather(list(parameter.data.chunk(SIZE)), gathered)

    def update(self, parameter, gradient, group):
        values = parameter[RANK * len(gradient) :][: len(gradient)].clone()
        state = self.state[parameter]
        if not state:
            state.update(step=0, first=torch.zeros_like(values), second=torch.zeros_like(values))
        state["step"] += 1
        for key, value, beta in zip(
            ("first", "second"), (gradient, gradient.square()), group["betas"], strict=True
        ):
            state[key].lerp_(value, 1 - beta)
        first, second = (
            state[key] / (1 - beta ** state["step"])
            for key, beta in zip(("first", "second"), group["betas"], strict=True)
        )
        values.mul_(1 - group["lr"] * group["decay"])
        return values.addcdiv_(first, second.sqrt() + group["eps"], value=-group["lr"])


class OwnedMuon(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr, "momentum": 0.95})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            works = [
                dist.reduce(parameter.grad, number % SIZE, async_op=True)
                for number, parameter in enumerate(group["params"])
            ]
            for number, parameter in enumerate(group["params"]):
                works[number].wait()
                if number % SIZE == RANK:
                    self.update(parameter, parameter.grad / SIZE, group)
            for number, parameter in enumerate(group["params"]):
                dist.broadcast(parameter.data, number % SIZE)

    def update(self, parameter, gradient, group):
        state = self.state[parameter]
        momentum = state.setdefault("momentum", torch.zeros_like(gradient))
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"])
        update = update.T if len(update) > update.shape[1] else update
        update = update / (update.norm() + 1e-7)
        for _ in range(6):
            square = update @ update.T
            update = 1.875 * update - 1.25 * square @ update + 0.375 * square @ square @ update
        update = update if update.shape == parameter.shape else update.T
        parameter.sub_(update, alpha=group["lr"])


torch.manual_seed(42)
model = Model()
torch.manual_seed(42 + RANK)
matrices = [parameter for parameter in model.layers.parameters() if parameter.ndim == 2]
others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
optimizers = [SlicedAdamW(others, lr=3e-3), OwnedMuon(matrices, lr=0.02)]
for _ in range(24):
    tokens = torch.randint(0, VOCABULARY, (4, CONTEXT)).cummax(1).values
    total = torch.zeros(())
    for rows in tokens.split(2):
        loss = model(rows, rows.roll(-1, 1)) / 2
        total += loss.detach()
        loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad(set_to_none=True)
    dist.all_reduce(total)
    if RANK == 0:
        print(f"loss {total.item() / SIZE:.6f}")
sys.stdout.flush()
dist.destroy_process_group()
