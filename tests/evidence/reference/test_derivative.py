import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from rankscope.evidence.canary.batch import CanaryDeclined
from rankscope.evidence.reference.derivative import DirectionalDerivative
from rankscope.evidence.reference.micro_batch import MicroBatch
from rankscope.evidence.reference.slopes import SlopeAnswer, Slopes, judge_slopes
from rankscope.evidence.reference.words import derived

CPU = torch.device("cpu")


class Routed(nn.Module):
    """Sends each token to its best of four experts; with dropout, a norm and a buffer."""

    def __init__(self, noise=lambda: 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(40, 16)
        self.norm = nn.BatchNorm1d(16)
        self.router = nn.Linear(16, 4, bias=False)
        self.experts = nn.Parameter(torch.randn(4, 16, 16) / 4)
        self.head = nn.Linear(16, 40)
        self.noise = noise

    def forward(self, ids, labels):
        hidden = F.dropout(self.norm(self.embedding(ids).flatten(0, 1)), 0.1)
        weights, chosen = self.router(hidden).softmax(-1).max(dim=-1)
        hidden = torch.einsum("th,thk->tk", hidden, self.experts[chosen]).tanh() * weights[:, None]
        loss = F.cross_entropy(self.head(hidden), labels.flatten()) * self.noise()
        return {"loss": loss}


@pytest.fixture(autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(model, *, factor=0.5):
    micros = []
    for number in range(2):
        draw = torch.Generator().manual_seed(number)
        ids, labels = torch.randint(40, (2, 8, 12), generator=draw)
        micro = MicroBatch(model, CPU, (ids, labels), {})
        output = model(ids, labels)
        micro.see_output(output)
        (output["loss"] * factor).backward()
        micros.append(micro)
    return micros


def bits(model):
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
    return [*(t.clone() for t in tensors), torch.get_rng_state()]


def verdict(model, micros):
    parameters = dict(model.named_parameters())
    derivative = DirectionalDerivative(model, parameters, CPU, worker=0, num_workers=1)
    derivative.check(micros)
    before = bits(model)
    slopes = derivative.measure(micros, clipped=1.0)
    assert all(torch.equal(one, other) for one, other in zip(before, bits(model), strict=True))
    again = Slopes.unpack(slopes.pack())
    return judge_slopes(again, 1), derived(judge_slopes(again, 1), again, 3, 1, 2)


def test_a_right_gradient_is_the_derivative_though_routes_would_jump():
    model = Routed()
    found, finding = verdict(model, train(model))
    assert found.answer is SlopeAnswer.AGREES
    assert all(abs(block.ratio - 1) < 2e-3 for block in found.blocks)
    assert finding.cause == "verify.agrees"


@pytest.mark.parametrize("lacking", ["a factor", "a part at right angles"])
def test_a_parameter_whose_gradient_is_wrong_is_named(lacking):
    model = Routed()
    micros = train(model)
    gradient = model.experts.grad
    if lacking == "a factor":
        gradient *= 0.5
    else:
        other = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(5))
        other -= gradient * (other * gradient).sum() / gradient.square().sum()
        gradient += other * gradient.norm() / other.norm()
    found, finding = verdict(model, micros)
    assert found.answer is SlopeAnswer.BLOCKS
    assert [block.label for block in found.odd] == ["experts"]
    assert found.odd[0].lacks == (lacking != "a factor")
    assert (finding.cause, finding.severity.name) == ("verify.derivative", "ERROR")
    assert "in experts" in finding.explanation


def test_a_block_that_is_nearly_right_is_set_apart_and_not_all_of_it_is_blamed():
    ratios_B = np.array([1.04, 1.0, 1.0, 1.0])
    changes_BDE = np.tile([[0.01, 0.02]], (4, 2, 1))
    numbers = {"loss": 4.0, "error": 0.0, "scale": 1.0, "rounds_in": 1e-7, "clipped": 1.0}
    slopes = Slopes(
        labels=("a (and 2 more)", "b (and 1 more)", "c", "d"),
        changes_BDE=changes_BDE,
        given_BDE=changes_BDE * ratios_B[:, None, None],
        usual_BD=np.full((4, 2), 0.01),
        num_ranks=2,
        parts=False,
        **numbers,
    )
    found = judge_slopes(slopes, 2)
    assert [block.label for block in found.odd] == ["a (and 2 more)"]
    finding = derived(found, slopes, 3, 2, 1)
    words = "in some of a (and 2 more) it differs (1.04 times that in all of them together)"
    assert words in finding.explanation


def test_a_forward_pass_that_does_not_repeat_itself_is_declined():
    hidden = torch.Generator()
    model = Routed(noise=lambda: 1 + 0.1 * float(torch.rand((), generator=hidden)))
    with pytest.raises(CanaryDeclined, match="does not repeat itself"):
        verdict(model, train(model))
