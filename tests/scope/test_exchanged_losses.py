import numpy as np
import pytest
import torch
import torch.distributed as dist
from benchmarks.faults.mesh_faults import exchange
from torch import nn
from torch.autograd import Function
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _python_dispatch

from rankscope import Run
from support.findings import events_of
from support.loops import bits_of, collect_warnings, watch
from support.ranks import run_ranks

ROWS, AT, STEPS = 6, 1, 3


def others(rows):
    """Gather the rows of all ranks, without a way back."""
    found = [torch.zeros_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(found, rows)
    return found


def contrast(rows, everywhere):
    targets = torch.arange(ROWS) + ROWS * dist.get_rank()
    return F.cross_entropy(5 * rows @ everywhere.t(), targets)


def gathered(rows):
    return contrast(rows, torch.cat(others(rows)))


def gathered_with_a_way_back(rows):
    return contrast(rows, torch.cat(all_gather(rows)))


def whole_on_each_rank(rows):
    parts = others(rows)
    parts[dist.get_rank()] = rows
    everywhere = torch.cat(parts)
    return F.cross_entropy(5 * everywhere @ everywhere.t().roll(1, 0), torch.arange(2 * ROWS))


def correlated(rows):
    """Sum a matrix over the ranks in its place, as Barlow Twins does."""
    matrix = rows.t() @ rows
    dist.all_reduce(matrix)
    return (matrix - torch.eye(len(matrix))).square().sum()


def assigned(rows):
    """Compare with targets that all ranks make together, without a gradient, as SwAV does."""
    with torch.no_grad():
        targets = (rows / 0.5).exp()
        total = targets.sum(0)
        dist.all_reduce(total)
        targets = F.normalize(targets / total, p=1, dim=1)
    return -(targets * rows.log_softmax(1)).sum(1).mean()


def logged(rows):
    loss = F.cross_entropy(rows @ rows.t(), torch.arange(ROWS))
    dist.all_reduce(loss.detach().clone())
    return loss


def into_parts(rows, group):
    found = torch.empty(2 * ROWS, rows.shape[1])
    dist.all_gather(list(found.chunk(2)), rows)
    return found


def own_part_of_sum(gradient, group):
    summed = gradient.clone()
    dist.all_reduce(summed)
    return summed[ROWS * dist.get_rank() :][:ROWS]


def gathered_into_parts(rows):
    return contrast(rows, exchange(rows, None, into_parts, own_part_of_sum))


class DividedCrossEntropy(Function):
    """Cross entropy of logits of which each rank has a part; one loss for each row."""

    @staticmethod
    def forward(ctx, logits, labels, right):
        size = logits.shape[1]
        total = logits.exp().sum(1)
        dist.all_reduce(total)
        own = (labels // size == dist.get_rank()).float()
        place = (labels % size)[:, None]
        predicted = logits.gather(1, place)[:, 0] * own
        dist.all_reduce(predicted)
        gradient = logits.exp() / total[:, None]
        ctx.save_for_backward(gradient.scatter_add_(1, place, -own[:, None]))
        ctx.right = right
        return total.log() - predicted

    @staticmethod
    def backward(ctx, incoming):
        (gradient,) = ctx.saved_tensors
        weight = incoming[:, None] if ctx.right else incoming[0]
        return gradient * weight, None, None


def divided(rows, *, right=True):
    labels, weights = torch.arange(ROWS) * 2 % 10, torch.arange(1.0, ROWS + 1)
    losses = DividedCrossEntropy.apply(rows, labels, right)
    return (losses * weights).sum() / weights.sum()


def divided_wrongly(rows):
    return divided(rows, right=False)


def dropped(rows):
    """Draw random numbers of the training, which a run of the loss must not use up."""
    return gathered_with_a_way_back(F.dropout(rows, 0.1))


def of_two_passes(rows, earlier):
    """Compare the rows of a second forward pass with those of the first one of all ranks."""
    return gathered_with_a_way_back(rows) + contrast(earlier, torch.cat(others(rows)))


def cached(wrapped, inputs):
    """Keep the rows' gradients; a hook runs the model again, and the backward pass of each half."""
    with torch.no_grad():
        rows = wrapped(inputs)
    loss = logged(rows.requires_grad_())
    loss.backward()

    @torch.enable_grad()
    def in_halves(gradient):
        kept, second = (gradient * rows.grad).chunk(2), inputs.chunk(2)[1]
        with wrapped.no_sync():
            (wrapped(inputs.chunk(2)[0]) * kept[0]).sum().backward()
        (wrapped(second) * kept[1]).sum().backward()

    loss = loss.detach().requires_grad_()
    loss.register_hook(in_halves)
    return loss


FOUND = {
    # a loss: what is found, how bad, and a part of the sentence
    gathered: ("verify.loss", "warning", "is not the derivative of the mean loss"),
    divided_wrongly: ("verify.loss", "warning", "exchanged tensors between the ranks"),
    gathered_with_a_way_back: ("verify.agrees", "note", "gave back to them is its derivative"),
    whole_on_each_rank: ("verify.agrees", "note", "times 0.5: each rank differentiates the loss"),
    correlated: ("verify.agrees", "note", "times 0.5: each rank differentiates the loss"),
    divided: ("verify.agrees", "note", "gave back to them is its derivative"),
    assigned: ("verify.agrees", "note", "was not computed again"),
    logged: ("verify.agrees", "note", "was not computed again"),
    dropped: ("verify.declined", "note", "it draws random numbers"),
    of_two_passes: ("verify.declined", "note", "and was not computed again"),
    cached: ("verify.agrees", "note", "each worker's mean loss counts alike"),
    gathered_into_parts: ("verify.declined", "note", "writes into a part of a tensor"),
}


def train(rank, loss, run_dir):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 6))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(100 + (0 if "divided" in loss.__name__ else rank))
    losses = []
    with watch(wrapped, optimizer, run_dir=run_dir, verify_at=[AT]):
        for _ in range(STEPS):
            inputs = torch.randn(ROWS, 4, generator=draw)
            given = () if loss is cached else (wrapped(inputs),)
            if given and "divided" not in loss.__name__:
                given = (F.normalize(given[0], dim=1),)
            if loss is of_two_passes:
                given = (wrapped(torch.randn(ROWS, 4, generator=draw)), *given)
            value = loss(*given) if given else loss(wrapped, inputs)
            value.backward()
            losses.append(value.item())
            optimizer.step()
            optimizer.zero_grad()
            assert _python_dispatch._get_current_dispatch_mode_stack() == []
    return bits_of(model), losses


def train_each(rank, folder):
    warnings = collect_warnings()
    losses = {}
    for loss in FOUND:
        watched = train(rank, loss, f"{folder}/{loss.__name__}")
        assert watched == train(rank, loss, None), loss
        losses[loss] = watched[1]
        assert warnings == [], loss
    return losses[cached]


@pytest.mark.ranks
def test_a_loss_of_several_ranks_is_held_against_its_gradient(tmp_path):
    losses_WS = run_ranks(train_each, 2, str(tmp_path))
    for loss, (cause, severity, sentence) in FOUND.items():
        events = events_of(tmp_path / loss.__name__)
        (finding,) = (one for one in events if one["cause"].startswith("verify."))
        said = finding["cause"], finding["severity"]
        assert said == (cause, severity), (loss.__name__, finding["explanation"])
        assert sentence in finding["explanation"], loss.__name__
    recorded_SW = Run.open(tmp_path / "cached").per_worker("loss")[1]
    np.testing.assert_allclose(recorded_SW, np.transpose(losses_WS), rtol=1e-6)
