import math
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.functional import cross_entropy

from rankscope.errors import UsageError
from rankscope.evidence.loss.probe import LossMeter, PendingLosses, _Multiplier, count_label_tokens
from rankscope.integrations.backward_loss import unscaled
from support.collected import to_arrays


def collected(meter):
    losses, weights = to_arrays(meter.collect()[0])
    return [loss.tolist() for loss in losses], [weight.tolist() for weight in weights]


def test_losses_are_picked_up_from_objects_and_mappings():
    meter = LossMeter(shifted=False)
    labels = torch.tensor([[1, -100, 3]])
    meter.see(SimpleNamespace(loss=torch.tensor(2.0)), {"labels": labels})
    meter.see({"loss": torch.tensor([3.0])}, {"labels": labels})
    assert collected(meter) == ([[2.0], [3.0]], [[2.0], [2.0]])
    assert collected(meter) == ([], [])


def test_causal_models_do_not_count_the_first_label():
    meter = LossMeter(shifted=True)
    labels = torch.tensor([[1, -100, 3], [4, 5, 6]])
    meter.see(SimpleNamespace(loss=torch.tensor(2.0)), {"labels": labels})
    assert collected(meter)[1] == [[3.0]]


def test_a_loss_over_the_tokens_of_all_micro_batches_becomes_the_mean_over_its_own():
    meter = LossMeter(shifted=False)
    loss = torch.tensor(0.5, requires_grad=True)
    labels = torch.tensor([[1, -100, 3]])
    meter.see({"loss": loss}, {"labels": labels, "num_items_in_batch": torch.tensor(8)})
    (loss * 2).backward()
    (micro,), multipliers = meter.collect()
    assert micro.values.numpy().tolist() == [2.0]  # 0.5 * 8 / 2
    assert multipliers.numpy().tolist() == [0.5]  # 2 * 2 / 8
    assert meter.collect() == ([], None)


def test_outputs_without_a_scalar_loss_are_left_alone():
    meter = LossMeter(shifted=False)
    for output in (torch.ones(3), None, (1, 2), {"loss": torch.ones(2)}, SimpleNamespace(loss=1.0)):
        meter.see(output, {})
    assert collected(meter) == ([], [])


def test_given_losses_win_and_unknown_weights_are_nan():
    meter = LossMeter(shifted=False)
    meter.give(torch.tensor([1.0, 2.0]), torch.tensor([3, 4]))
    meter.give(5.0)
    meter.see(SimpleNamespace(loss=torch.tensor(9.0)), {})
    losses, weights = to_arrays(meter.collect()[0])
    assert [loss.tolist() for loss in losses] == [[1.0, 2.0], [5.0]]
    assert weights[0].tolist() == [3.0, 4.0]
    assert np.isnan(weights[1]).all()


def test_a_loss_is_read_when_it_is_given_and_keeps_no_graph():
    meter = LossMeter(shifted=False)
    value = torch.tensor(1.0, requires_grad=True)
    loss = value * 2
    meter.give(loss)
    with torch.no_grad():
        loss.add_(5)
    assert collected(meter)[0] == [[2.0]]


@pytest.mark.parametrize(
    ("value", "weight"),
    [(torch.ones(2, 2), None), (torch.ones(2), torch.ones(3)), (1.0, torch.ones(2))],
)
def test_wrong_shapes_are_refused(value, weight):
    with pytest.raises(UsageError, match=r"loss\(\) expected"):
        LossMeter(shifted=False).give(value, weight)


class TestWhatTheLossWasMultipliedBy:
    """Factors between a loss and its backward pass, told from the gradient at the loss."""

    @pytest.fixture
    def meter(self):
        return LossMeter(shifted=False)

    @pytest.fixture
    def model(self):
        torch.manual_seed(0)
        return nn.Linear(4, 1)

    def losses(self, model, size=3, seed=0):
        """Return one loss per sample ``[B]``."""
        batch = torch.randn(size, 4, generator=torch.Generator().manual_seed(seed))
        return model(batch).square().flatten()

    def scale(self, meter):
        scale = meter.collect()[1]
        return None if scale is None else float(scale.numpy().sum())

    @pytest.mark.parametrize("factor", [1.0, 65536.0, 1 / 3, -2.0, 0.0])
    @pytest.mark.parametrize("given", [False, True])
    def test_a_factor(self, meter, model, factor, given):
        loss = self.losses(model).mean()
        if given:
            meter.give(loss)
        else:
            meter.see(SimpleNamespace(loss=loss), {})
        (loss * factor).backward()
        assert self.scale(meter) == np.float32(factor)
        assert self.scale(meter) is None

    def test_several_factors_and_other_terms(self, meter, model):
        loss = self.losses(model).mean()
        meter.see({"loss": loss}, {})
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        (((loss + 0.01 * penalty) * 1024) / 4).backward()
        assert self.scale(meter) == 256.0

    def test_a_factor_in_place(self, meter, model):
        loss = self.losses(model).mean()
        meter.see({"loss": loss}, {})
        loss /= 4
        loss.backward()
        assert self.scale(meter) == 0.25

    def test_one_that_cannot_be_read_is_unknown_and_the_backward_pass_goes_on(self, model):
        loss = self.losses(model).mean()
        unit = torch.ones((), device="meta")  # it has no value
        multiplier = _Multiplier(loss, unit)
        loss.backward()
        assert multiplier.value is None
        assert model.weight.grad is not None

    @pytest.mark.parametrize(("divisor", "expected"), [(4, 1.0), (1, 4.0)])
    def test_it_is_summed_over_micro_batches(self, meter, model, divisor, expected):
        for micro in range(4):
            loss = self.losses(model, seed=micro).mean()
            meter.see({"loss": loss}, {})
            (loss / divisor).backward()
        assert self.scale(meter) == expected

    @pytest.mark.parametrize(
        ("reduce", "expected"),
        [
            (lambda losses: losses.mean(), 1.0),
            (lambda losses: losses.sum(), 5.0),
            (lambda losses: 512 * (losses @ torch.tensor([0.5, 0.25, 0.0, 0.0, 0.25])), 512.0),
        ],
        ids=["mean", "sum", "weighted mean, scaled"],
    )
    def test_one_loss_per_sample(self, meter, model, reduce, expected):
        losses = self.losses(model, size=5)
        meter.give(losses)
        reduce(losses).backward()
        assert self.scale(meter) == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_the_sum_over_samples_is_not_rounded_to_half_precision(self, meter, dtype):
        losses = torch.ones(257, dtype=dtype, requires_grad=True)
        meter.give(losses)
        losses.float().sum().backward()
        assert self.scale(meter) == 257.0  # not a bfloat16

    def test_what_is_given_wins_over_what_is_seen(self, meter, model):
        seen = self.losses(model).mean()
        meter.see({"loss": seen}, {})
        given = seen / 2
        meter.give(given)
        (given * 8).backward()
        assert self.scale(meter) == 8.0

    def test_a_loss_given_as_a_number_takes_the_factor_of_the_one_that_was_seen(self, meter, model):
        for micro in range(3):
            loss = self.losses(model, seed=micro).mean()
            meter.see({"loss": loss}, {})
            (loss * 16).backward()
            meter.give(loss.item())
        losses, scale = meter.collect()
        assert len(losses) == 3
        assert scale.numpy().tolist() == [16.0, 16.0, 16.0]

    def test_each_micro_batch_has_its_own_in_their_order(self, meter, model):
        losses = []
        for micro in range(3):
            loss = self.losses(model, seed=micro).mean()
            meter.see({"loss": loss}, {})
            losses.append(loss)
        for loss, factor in reversed(list(zip(losses, (0.5, 2.0, 8.0), strict=True))):
            (loss * factor).backward()
        assert meter.collect()[1].numpy().tolist() == [0.5, 2.0, 8.0]

    def test_forward_passes_that_do_not_count_have_none(self, meter, model):
        for forward in range(3):
            loss = self.losses(model, seed=forward).mean()
            meter.see({"loss": loss}, {}, forward)
            if forward != 1:  # a pass whose output nobody uses
                (loss * (forward + 1)).backward()
        assert meter.collect(idle={1})[1].numpy().tolist() == [1.0, 3.0]

    def test_it_is_unknown_for_a_loss_without_a_backward_pass(self, meter, model):
        loss = self.losses(model).mean()
        for value in (loss.detach(), loss.item(), torch.tensor(3), loss):
            meter.give(value)
            assert self.scale(meter) is None
        with torch.no_grad():
            meter.see({"loss": self.losses(model).mean()}, {})
        assert self.scale(meter) is None

    def test_it_is_unknown_when_one_micro_batch_was_left_out(self, meter, model):
        for micro in range(2):
            loss = self.losses(model, seed=micro).mean()
            meter.see({"loss": loss}, {})
            if micro == 0:
                loss.backward()
        assert self.scale(meter) is None

    def test_a_gradient_penalty_in_between_does_not_count(self, meter, model):
        loss = self.losses(model).mean()
        meter.give(loss)
        gradients = torch.autograd.grad(loss, model.parameters(), create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in gradients)
        (32 * (loss + 0 * penalty)).backward()
        assert self.scale(meter) == 32.0

    def test_a_loss_whose_gradient_is_undefined_does_not_stop_the_backward_pass(self, meter):
        class Cut(torch.autograd.Function):
            @staticmethod
            def forward(ctx, value):
                return value.clone()

            @staticmethod
            def backward(ctx, gradient):
                return None

        parameter = torch.ones(2, requires_grad=True)
        loss = parameter.sum()
        meter.give(loss)
        (Cut.apply(loss) + parameter.sum()).backward()
        assert parameter.grad.tolist() == [1.0, 1.0]
        assert self.scale(meter) is None

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_gradients_keep_their_bits(self, meter, dtype):
        def gradients(watched):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
            batch = torch.randn(7, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
            losses = model(batch).square().flatten()
            if watched:
                meter.give(losses)
                meter.see({"loss": losses.mean()}, {})
            (losses.mean() * 1000 / 3).backward()
            return [parameter.grad for parameter in model.parameters()]

        for plain, watched in zip(gradients(False), gradients(True), strict=True):
            assert torch.equal(plain, watched)

    def test_a_meter_keeps_no_graph_alive(self, meter):
        nodes = []

        class Node(torch.autograd.Function):
            @staticmethod
            def forward(ctx, value):
                nodes.append(weakref.ref(ctx))
                return value.clone()

            @staticmethod
            def backward(ctx, gradient):
                return gradient

        loss = Node.apply(torch.ones(2, requires_grad=True)).sum()
        meter.give(loss)
        meter.see({"loss": loss}, {})
        loss.backward()
        assert nodes[0]() is not None
        del loss
        assert nodes[0]() is None
        assert self.scale(meter) == 1.0


def test_a_factor_is_taken_out_of_the_loss_and_counts_as_a_multiplier():
    meter = LossMeter(shifted=False)
    loss = torch.tensor(6.0, requires_grad=True)
    meter.give(loss, 5, factor=torch.tensor(1.5))
    (loss / 2).backward()
    (micro,), multipliers = meter.collect()
    assert micro.values.numpy().tolist() == [4.0]
    assert multipliers.numpy().tolist() == [0.75]


def test_a_spare_loss_counts_only_where_backward_passes_the_model_s_own_by():
    meter = LossMeter(shifted=False)
    for trains_on_own in (True, False):
        own = torch.tensor(3.0, requires_grad=True)
        spare = torch.tensor(8.0, requires_grad=True)
        meter.see({"loss": own}, {})
        meter.give(spare, 5, factor=2, spare=True)
        (own if trains_on_own else spare).backward()
        (micro,), multipliers = meter.collect()
        assert micro.values.numpy().tolist() == [3.0 if trains_on_own else 4.0]
        assert multipliers.numpy().tolist() == [1.0 if trains_on_own else 2.0]
    meter.see({"loss": torch.tensor(3.0)}, {})
    meter.give(7.0, spare=True)
    assert collected(meter)[0] == [[3.0]]  # backward is known of neither
    meter.give(7.0, spare=True)
    assert collected(meter)[0] == [[7.0]]


def test_a_micro_batch_without_label_tokens_has_no_loss_and_is_no_fault():
    meter = LossMeter(shifted=False)
    labels = torch.tensor([[-100, -100]])
    meter.see({"loss": torch.tensor(0.0)}, {"labels": labels, "num_items_in_batch": 8})
    assert collected(meter) == ([[0.0]], [[0.0]])


def test_labels_that_are_aligned_already_are_counted_as_they_are():
    labels, aligned = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, -100]])
    assert count_label_tokens({"labels": labels}, shifted=True).tolist() == [2]
    assert count_label_tokens({"labels": labels}, shifted=False).tolist() == [3]
    assert count_label_tokens({"labels": labels[0]}, shifted=True).tolist() == [3]
    named = {"labels": labels, "shift_labels": aligned}
    assert count_label_tokens(named, shifted=True).tolist() == [2]
    assert count_label_tokens({}, shifted=True) is None


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_loss_that_each_rank_holds_is_taken_from_a_dtensor(mesh, caplog):
    meter = LossMeter(shifted=False)
    local = torch.tensor(2.0, requires_grad=True)
    loss = DTensor.from_local(local, mesh, [Replicate()])
    meter.see({"loss": loss}, {"labels": DTensor.from_local(torch.tensor([[3]]), mesh)})
    meter.give(loss, DTensor.from_local(torch.tensor(5), mesh, [Replicate()]))
    (loss * 3).backward()
    losses, multipliers = meter.collect()
    assert [array.tolist() for arrays in to_arrays(losses) for array in arrays] == [[2.0], [5.0]]
    assert multipliers.numpy().tolist() == [3.0]
    assert not caplog.records


@pytest.mark.parametrize("placement", [Partial(), Shard(0)])
def test_a_loss_that_is_spread_over_ranks_is_declined_in_one_line(mesh, caplog, placement):
    meter = LossMeter(shifted=False)
    spread = DTensor.from_local(torch.ones(1, requires_grad=True), mesh, [placement])
    for _ in range(2):
        meter.see({"loss": spread}, {})
        meter.give(spread)
        meter.give(1.0, spread)
    spread.to_local().sum().backward()
    assert meter.collect() == ([], None)
    [record] = caplog.records
    assert "scope.loss() the local loss" in record.message


@pytest.mark.parametrize(
    ("make", "micro", "value", "scale"),
    [
        (lambda x: x.exp().mean(), 2, math.exp(1.5), 2.0),  # a mean: the divisor is missing
        (lambda x: x.exp().sum() / 3, 1, math.exp(1.5), 1.0),
        (lambda x: x.exp().sum() * 2 / 5, 1, 3 * math.exp(1.5) * 2 / 5, 1.0),
        (lambda x: x.exp().sum() / 6, 2, math.exp(1.5), 1.0),
        (lambda x: x.exp().sum() / 2 * 65536, 2, 3 * math.exp(1.5), 65536.0),
    ],
    ids=["mean", "sum over its terms", "sum over all tokens", "its share of all", "scaled"],
)
def test_a_loss_of_unknown_make_is_recorded_as_backward_was_called_on_it(make, micro, value, scale):
    meter = LossMeter(shifted=False)
    for forward in range(micro):
        x = torch.full((3,), 1.5, requires_grad=True)
        root = make(x)
        loss, factor, constant, *_ = unscaled(root, {})
        meter.give(loss, None, forward, factor=factor, constant=constant, spare=True)
        root.backward()
    parts = PendingLosses(*meter.collect(), 1.0).read().arrays
    losses = np.frombuffer(parts["losses_U"])
    assert losses.tolist() == [pytest.approx(value)] * micro
    assert np.frombuffer(parts["multipliers_M"]).sum() == pytest.approx(scale)


@pytest.mark.parametrize(
    ("divide", "divisor", "weight"),
    [
        (lambda total: total / torch.tensor(6.0), 6.0, 0.5),
        (lambda total: total / 6, 6.0, 0.5),
        (lambda total: total, 1.0, 3.0),
        (lambda total: total / torch.tensor(3.0) / 2 * torch.tensor(1024.0), 6.0, 512.0),
        (lambda total: 2 * total / 12, 6.0, 0.5),
    ],
    ids=["a tensor", "a number", "nothing", "scaled", "both"],
)
def test_of_a_sum_over_label_tokens_the_mean_is_known(divide, divisor, weight):
    meter = LossMeter(shifted=False)
    logits = torch.zeros(4, 5, requires_grad=True)
    labels = torch.tensor([1, -100, 2, 3])
    root = divide(cross_entropy(logits, labels, reduction="sum"))
    found = unscaled(root, {})
    how = {"factor": found.factor, "constant": found.constant, "summed": found.summed}
    meter.give(found.loss, **how, spare=True)
    root.backward()
    parts = PendingLosses(*meter.collect(), 1.0).read().arrays
    expected = [3.0, divisor, math.log(5), weight]
    assert np.frombuffer(parts["sums_M4"]) == pytest.approx(expected)


@pytest.mark.parametrize("weighted", [{"weight": torch.ones(5)}, {"reduction": "none"}])
def test_a_sum_with_weights_of_classes_or_of_single_losses_counts_no_tokens(weighted):
    logits = torch.zeros(4, 5, requires_grad=True)
    labels = torch.tensor([1, -100, 2, 3])
    total = cross_entropy(logits, labels, **{"reduction": "sum", **weighted}).sum()
    for root in (total, total / torch.tensor(3.0), total / 3):
        assert unscaled(root, {}).summed is None


KEPT = torch.tensor([1.0, 0.0, 1.0, 1.0])


@pytest.mark.parametrize(
    "make",
    [
        lambda losses: losses[KEPT.bool()].mean(),
        lambda losses: torch.masked_select(losses, KEPT.bool()).mean() / 2 * 1024,
        lambda losses: losses[KEPT.bool()].sum() / 3,
        lambda losses: (losses * KEPT).sum() / KEPT.sum(),
        lambda losses: (KEPT.bool() * losses).sum() / KEPT.bool().sum(),
        lambda losses: (losses * KEPT).sum() / KEPT.sum().clamp(min=1) / 2,
    ],
    ids=["selection", "masked_select", "sum of a selection", "mask", "mask of bools", "clamped"],
)
def test_label_tokens_of_a_masked_loss_are_counted(make):
    losses = torch.ones(4, requires_grad=True).exp()
    found = unscaled(make(losses), {})
    count = found.tokens if found.summed is None else found.summed[0]
    assert float(count) == 3


def test_a_product_with_other_numbers_than_a_mask_counts_no_tokens():
    losses = torch.ones(4, requires_grad=True).exp()
    advantages = torch.tensor([0.5, 1.0, 2.0, 0.0])
    for shape in (advantages, advantages[:1]):
        summed = unscaled((losses * shape).sum() / 4, {}).summed
        assert summed is None or math.isnan(float(summed[0]))
    assert unscaled(losses.mean(), {}).tokens is None


def test_label_tokens_of_a_mean_cross_entropy_are_counted():
    labels = torch.tensor([1, -100, 2, 3])
    for make in (lambda loss: {"loss": loss}, lambda loss: {"loss": loss.clone()}):
        loss = cross_entropy(torch.zeros(4, 5, requires_grad=True), labels)
        assert float(unscaled(loss / 8, {}).tokens) == 3
        meter = LossMeter(shifted=False)
        meter.see(make(loss), {})
        [micro], _ = meter.collect()
        assert micro.weights.numpy().tolist() == [3]


def test_what_a_model_returned_is_its_loss_only_if_it_is_a_mean():
    for make, value, scale in ((torch.mean, 0.5, 1 / 6), (torch.sum, 1 / 6, 1.0)):
        x = torch.full((2,), 0.5, requires_grad=True)
        meter = LossMeter(shifted=False)
        loss = make(x)
        meter.see({"loss": loss}, {})
        (loss / 6).backward()  # as over six terms
        parts = PendingLosses(*meter.collect(), 1.0).read().arrays
        assert np.frombuffer(parts["losses_U"]).tolist() == [pytest.approx(value)]
        assert np.frombuffer(parts["multipliers_M"]).tolist() == [pytest.approx(scale)]
