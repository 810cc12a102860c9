import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rankscope.bus.groups import Groups
from rankscope.evidence.canary.batch import CanaryDeclined
from rankscope.evidence.reference.direct import DirectGradients
from rankscope.evidence.reference.micro_batch import MicroBatch
from rankscope.evidence.reference.models import WholeModel, measure_gradients
from rankscope.evidence.reference.reference import ReferenceStep
from rankscope.evidence.reference.verify import ReferenceAnswer, verify
from rankscope.gradients.sketch import Sketcher
from support.models import PassedOn
from support.reference_share import share_of

CPU = torch.device("cpu")


class Tokens:
    """A batch that is an object, as those of detectors are."""

    def __init__(self, ids) -> None:
        self.fields = {"ids": ids}
        self.size = tuple(ids.shape)


class Net(nn.Module):
    """Draws from every generator, normalises by batch, counts, and returns what it is asked for."""

    def __init__(self, returns: str = "loss", noise=lambda: 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(30, 12)
        self.norm = nn.BatchNorm1d(12)
        self.head = nn.Linear(12, 30)
        self.unused = nn.Linear(3, 3)
        self.own = torch.Generator().manual_seed(3)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("graph", torch.eye(12).to_sparse())
        self.returns, self.noise, self.calls = returns, noise, 0

    def forward(self, ids, labels=None):
        self.calls += 1
        ids = ids.fields["ids"] if isinstance(ids, Tokens) else ids
        self.scale.mul_(1.01)
        hidden = F.dropout(self.embedding(ids), 0.2).flatten(0, 1)
        hidden = hidden * (1 + 0.1 * torch.rand((), generator=self.own))
        hidden = self.norm(hidden) * (self.scale + random.random() + np.random.rand())  # noqa: NPY002
        logits = checkpoint(self.head, hidden, use_reentrant=False) * self.noise()
        if self.returns == "logits":
            return logits
        loss = F.cross_entropy(logits.float(), labels.flatten())
        return {"loss": loss, "logits": logits, "hidden": hidden}


def make_batch(number):
    generator = torch.Generator().manual_seed(number)
    return {name: torch.randint(30, (4, 6), generator=generator) for name in ("ids", "labels")}


def loss_of(output, batch, kind):
    if kind == "logits":
        return F.cross_entropy(output.float(), batch["labels"].flatten(), reduction="sum") / 7
    if kind == "own loss":  # the model's is left alone
        return output["logits"].square().mean() * 0.3
    if kind == "two places":
        return output["loss"] + output["hidden"].square().mean()
    return output["loss"] * 0.3


def train(model, kind, *, autocast=False, num_micro=3):
    micros, gradients = [], []
    for number in range(num_micro):
        batch = make_batch(number)
        arguments = (batch["ids"],) if kind == "logits" else (batch["ids"], batch["labels"])
        if kind == "an object":
            arguments = (Tokens(batch["ids"]), batch["labels"])
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            micro = MicroBatch(model, CPU, arguments, {})
            output = model(*arguments)
            micro.see_output(output)
        loss_of(output, batch, kind).backward()
        gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        model.zero_grad()
        micros.append(micro)
    return micros, gradients


def state_of(model):
    tensors = [*model.state_dict().values(), torch.get_rng_state(), model.own.get_state()]
    numpys = np.random.get_state(legacy=False)["state"]["key"].tolist()  # noqa: NPY002
    return [t.to_dense().tolist() for t in tensors], model.calls, random.getstate(), numpys


@pytest.mark.parametrize(
    ("autocast", "kind"),
    [
        (False, "loss"),
        (True, "logits"),
        (False, "own loss"),
        (False, "an object"),
        (False, "float64"),
    ],
)
def test_each_micro_batch_gives_the_same_bits_again_and_leaves_no_trace(kind, autocast):
    model = Net("logits" if kind == "logits" else "loss")
    if kind == "float64":
        model.double()
    micros, gradients = train(model, kind, autocast=autocast)
    parameters = list(model.parameters())
    parameters[0].grad = kept = torch.ones_like(parameters[0])
    before = state_of(model)
    for number in (2, 0, 1):
        again = micros[number].gradients(model, parameters)
        for one, other in zip(again, gradients[number], strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)
    assert state_of(model) == before
    assert parameters[0].grad is kept
    assert bool((kept == 1).all())


def test_an_output_to_which_no_gradient_comes_is_left_out():
    model = Net()
    batch = make_batch(0)
    micro = MicroBatch(model, CPU, (batch["ids"], batch["labels"]), {})
    output = model(batch["ids"], batch["labels"])
    beside = output["logits"] * 2  # the loss was not computed from it
    micro.see_output([output["loss"], beside])
    loss, _ = PassedOn.apply(output["loss"], beside)
    loss.backward()
    micro.check_kept()
    assert [gradient is None for gradient in micro.arrived] == [False, True]


def test_a_step_is_measured_in_sketches_that_add_up_to_it():
    model = Net()
    micros, gradients = train(model, "loss")
    for index, parameter in enumerate(model.parameters()):
        found = [gradient[index] for gradient in gradients]
        parameter.grad = None if found[0] is None else torch.stack(found).sum(0)
    part = ReferenceStep(WholeModel(model, 2), CPU, 2, seed=1).compute(micros)
    assert part.names == tuple(name for name, _ in model.named_parameters())
    assert part.terms_MPK.shape == (3, len(part.names), 251)
    np.testing.assert_allclose(part.terms_MPK.sum(0), part.given_PK, atol=1e-6)
    exact = [[0 if g is None else float(g.double().norm()) for g in of] for of in gradients]
    np.testing.assert_allclose(part.norms_MP, exact, rtol=1e-6)
    assert not part.unsteady_P.any()


@pytest.mark.parametrize("clipped", [1.0, 0.3])
def test_the_gradient_of_a_parameter_of_millions_of_elements_agrees(clipped):
    gradients = torch.randn(2, 5_000_000, generator=torch.Generator().manual_seed(0))
    reduced = gradients.mean(0)
    measured = [sketched(gradient) for gradient in [*gradients, reduced, clipped * reduced]]
    norm = np.array([float(gradients[0].double().norm())])
    known = {"elements_P": np.array([5e6]), "norms_MP": norm[None], "copies": 2}
    known |= {"names": ("weight",), "given_PK": measured[3], "reduced_PK": measured[2]}
    shares = [share_of(terms_MPK=measured[rank][None], **known) for rank in range(2)]
    found = verify(shares, [np.ones(1)] * 2, [])
    assert (found.answer, found.clipped) == (ReferenceAnswer.AGREES, pytest.approx(clipped, 1e-4))


def sketched(gradient):
    sketcher = Sketcher(CPU, Groups(("weight",), {"weight": 0}), 251, seed=3)
    totals = sketcher.new_totals()
    measure_gradients(sketcher, ("weight",), [gradient], totals)
    return totals.sketches.numpy().copy()


def test_a_forward_pass_that_does_not_repeat_itself_is_declined():
    hidden = torch.Generator()
    model = Net(noise=lambda: 1 + 0.1 * torch.rand((), generator=hidden))
    micros, _ = train(model, "loss")
    with pytest.raises(CanaryDeclined, match="does not repeat itself"):
        micros[0].gradients(model, list(model.parameters()))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def direct_of(loss, outputs, model):
    edges = {(output.grad_fn, output.output_nr) for output in outputs}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    direct = DirectGradients([loss], edges, names)
    loss.backward()
    direct.remove()
    return direct


def test_what_the_loss_takes_of_parameters_is_kept_and_what_came_through_outputs_is_not(model):
    other = nn.Linear(2, 2)  # of the loss's own
    first, last = model[0].weight, model[2].bias

    def loss_of(output):
        temperature = last.sum().exp()
        penalty = first.square().sum() + first.sum()
        return (other(output) * temperature).square().mean() + penalty * temperature

    outputs = [model(torch.randn(5, 3)) for _ in range(2)]
    direct = direct_of(loss_of(outputs[0] + outputs[1]), outputs, model)
    cut = loss_of((outputs[0] + outputs[1]).detach())
    assert not direct.takes_inner
    assert direct.by_name.keys() == {"0.weight", "2.bias"}
    for name, parameter in (("0.weight", first), ("2.bias", last)):
        (expected,) = torch.autograd.grad(cut, parameter, retain_graph=True)
        torch.testing.assert_close(direct.by_name[name], expected)


def test_a_loss_of_outputs_alone_takes_nothing_else(model):
    output = model(torch.randn(5, 3))
    direct = direct_of(output.square().mean(), [output], model)
    assert not direct.by_name
    assert not direct.takes_inner


def test_a_value_of_the_forward_pass_that_is_not_returned_is_seen(model):
    inner = model[0](torch.randn(5, 3))
    output = model[2](inner.relu())
    assert direct_of(output.sum() + inner.sum(), [output], model).takes_inner


def test_a_gradient_that_cannot_be_kept_does_not_reach_the_training(model, monkeypatch):
    output = model(torch.randn(5, 3))

    def fail(*_):
        raise MemoryError("none left")

    monkeypatch.setattr(DirectGradients, "_keep", fail)
    direct = direct_of(output.sum() + model[2].bias.square().sum(), [output], model)
    assert "none left" in direct.lost
    assert model[2].bias.grad is not None
