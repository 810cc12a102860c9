import copy
import traceback

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fsdp_state
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rankscope.bus.groups import block_of, group_parameters
from rankscope.bus.probe import Probe
from rankscope.errors import UnsupportedError
from rankscope.gradients.sketch import Sketcher
from rankscope.wrappers.fsdp2 import find_fsdp2
from rankscope.wrappers.fsdp2_model import is_fsdp2
from rankscope.wrappers.tap import ReadReduced, TapPlan
from support.cut import Cut
from support.fsdp2_modes import Block, Net, make_batches, make_net, mode_named
from support.fsdp2_training import Session, local_gradient, optimize, start, train_step
from support.ranks import run_ranks
from support.releases import SINCE_TORCH_2_13

pytestmark = pytest.mark.ranks


WIDTH, EXACT = 1021, 1e-5


def make_tap(session):
    wrapped = find_fsdp2(session.model)
    sketcher = Sketcher(wrapped.device, group_parameters(wrapped.parameters), WIDTH)
    plan = TapPlan(sketcher, lambda work: work(), ReadReduced.SKETCH, Probe())
    return wrapped.make_tap(plan)


def train_tapped(session, step, tap):
    train_step(session, step, begin=lambda: tap.begin_forward(measure=True))


def other_gradients(session, step, tap, *, measure):
    """Ask for the gradient of a layer's output alone, as attacks on a model do."""
    outputs = []
    hook = session.root.blocks[0].register_forward_hook(
        lambda module, args, output: outputs.append(output)
    )
    tap.begin_forward(measure=measure)
    loss = session.model(*make_batches(session.worker, step, 1)[0])
    hook.remove()
    (gradient,) = torch.autograd.grad(loss, outputs)
    assert gradient.abs().max() > 0


def sketch_error(tap, local, exact):
    """Return how far what was read is from the sketch of a gradient, relative to it."""
    totals = tap._sketcher.new_totals()
    for name, gradient in exact.items():
        tap._sketcher.measure(name, gradient, totals)
    error = (local.totals.sketches - totals.sketches).norm() / totals.sketches.norm()
    return float(error)


def norm_error(local, exact):
    squared_norm = sum(float(gradient.double().square().sum()) for gradient in exact.values())
    return abs(float(local.totals.squared_norms.sum()) / squared_norm - 1) / 2


def reduced_error(local, exact):
    mean = torch.cat([gradient.double().flatten() for gradient in exact.values()])
    squared_norm = local.reduced.squared_norms.sum()
    dist.all_reduce(mean)
    dist.all_reduce(squared_norm)
    exact_squared_norm = (mean / dist.get_world_size()).square().sum()
    return abs(float(squared_norm / exact_squared_norm) - 1) / 2


def session_of(model):
    optimizer = torch.optim.SGD(model.parameters())
    mode = mode_named("1-D")
    return Session(mode, model, model, model, optimizer, None, dist.get_rank())


def gradients(model):
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def check(tap, exact):
    """Return what was read, after a look at its sketch and at the reduced gradient's norm."""
    assert tap.complete
    assert not tap.aborted
    local = tap.collect()
    assert sketch_error(tap, local, exact) < EXACT
    assert reduced_error(local, exact) < EXACT
    return local


def a_root_that_is_checkpointed():
    session = start(mode_named("accumulated"))
    tap = make_tap(session)
    calls = []

    def begin(module, args):
        calls.append(tap.aborted)
        tap.begin_forward(measure=True)

    session.root.register_forward_pre_hook(begin)
    exact, _ = local_gradient(session, 0)
    for micro, batch in enumerate(make_batches(session.worker, 0, 3)):
        session.root.set_requires_gradient_sync(micro == 2)
        (checkpoint(session.root, *batch, use_reentrant=False) / 3).backward()
    assert calls == [False] * 6  # every second one recomputes, inside of a backward pass
    local = check(tap, exact)
    assert len(local.micro_squared_norms) == 3
    tap.remove()


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(22, 50)
        self.block = Block(50)
        self.norm = nn.LayerNorm(50)
        self.head = nn.Linear(50, 22)

    def forward(self, ids):
        return self.norm(self.block(self.embedding(ids)))

    def loss(self, hidden, labels):
        logits = self.head(hidden.flatten(0, 1))
        return F.cross_entropy(logits, labels.flatten(), reduction="sum")


def a_loss_in_chunks_with_backward_passes_of_their_own():
    trunk = Trunk()
    alone = copy.deepcopy(trunk)
    fully_shard(trunk.block)
    fully_shard([trunk.norm, trunk.head])
    fully_shard(trunk)
    session = session_of(trunk)
    tap = make_tap(session)
    ids, labels = make_batches(session.worker, 0, 1)[0]
    alone.loss(alone(ids), labels).backward()
    tap.begin_forward(measure=True)
    hidden = trunk(ids)
    cut = hidden.detach().requires_grad_()
    for chunk in (slice(0, 1), slice(1, 4)):
        trunk.loss(cut[chunk], labels[chunk]).backward()
    hidden.backward(cut.grad)
    local = check(tap, gradients(alone))
    squared_norms = dict.fromkeys(tap._sketcher.groups.names, 0.0)
    for name, gradient in gradients(alone).items():
        squared_norms[block_of(name)] += float(gradient.double().square().sum())
    for measured, (name, exact) in zip(
        local.totals.squared_norms.tolist(), squared_norms.items(), strict=True
    ):
        in_parts = name == "head"
        assert measured == pytest.approx(exact, rel=5 * (2 / WIDTH) ** 0.5 if in_parts else EXACT)
    tap.remove()


def a_model_that_is_not_sharded_is_refused():
    net = make_net()
    assert not is_fsdp2(net)
    with pytest.raises(UnsupportedError, match="got Net without any; call watch"):
        find_fsdp2(net)
    assert is_fsdp2(nn.Sequential(fully_shard(net)))


def check_two_steps(model, alone):
    session = session_of(model)
    tap = make_tap(session)
    for step in range(2):
        for each in (model, alone):
            each.zero_grad()
        batch = make_batches(session.worker, step, 1)[0]
        alone(*batch).backward()
        tap.begin_forward(measure=True)
        model(*batch).backward()
        local = check(tap, gradients(alone))
        assert norm_error(local, gradients(alone)) < EXACT
    tap.remove()


def tied_weights():
    net = make_net()
    net.head.weight = net.embedding.weight
    alone = copy.deepcopy(net)
    fully_shard(net.blocks[0])
    fully_shard(net)
    assert "head.weight" not in find_fsdp2(net).parameters
    check_two_steps(net, alone)


class Spare(Net):
    def __init__(self):
        super().__init__()
        self.spare = Block(50)


def unused_parameters():
    for reduce_zeros in (False, True) if SINCE_TORCH_2_13 else (None,):
        torch.manual_seed(0)
        net = Spare()
        alone = copy.deepcopy(net)
        fully_shard(net.spare)
        fully_shard(net)
        if reduce_zeros is not None:
            net.set_reduce_scatter_unused_params(reduce_zeros)
        check_two_steps(net, alone)


def ignored_parameters_are_left_out():
    net = make_net()
    alone = copy.deepcopy(net)
    alone.gate.requires_grad_(False)
    fully_shard(net, ignored_params=set(net.gate.parameters()))
    assert [name for name in find_fsdp2(net).parameters if name.startswith("gate")] == []
    check_two_steps(net, alone)


def torch_functions():
    state = _fsdp_state.FSDPState
    return [
        _fsdp_param_group.foreach_reduce,
        state._register_root_post_backward_final_callback,
        state._root_post_backward_final_callback,
        getattr(state, "_end_backward_iteration", None),  # since torch 2.15
    ]


def check_step(session, tap, step):
    exact, _ = local_gradient(session, step)
    train_tapped(session, step, tap)
    assert tap.complete
    local = tap.collect()
    assert sketch_error(tap, local, exact) < EXACT
    assert session.mode.parts or norm_error(local, exact) < EXACT
    optimize(session)
    return local


class Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden):
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("in the middle of a backward pass")


def explode(session, tap):
    """Run a step whose backward pass raises after a part of the reductions."""
    hook = session.root.blocks[0].register_forward_hook(
        lambda module, args, output: Explode.apply(output)
    )
    with pytest.raises(ArithmeticError):
        train_tapped(session, 0, tap)
    hook.remove()
    assert not tap.complete
    assert tap.aborted
    assert tap._read
    session.root.reset_iter_state()
    session.optimizer.zero_grad()


def forget_unreduced_gradients(session):
    """Drop what an aborted pass has left in the unsharded parameters; torch keeps it."""
    for module in [session.root, *session.root.blocks]:
        module.unshard()
    session.root.zero_grad()
    for module in [session.root, *session.root.blocks]:
        module.reshard()


def an_aborted_pass_is_not_counted():
    session = start(mode_named("1-D"))
    tap = make_tap(session)
    explode(session, tap)
    forget_unreduced_gradients(session)
    for step in range(1, 3):
        check_step(session, tap, step)
        assert not tap.aborted
    tap.remove()


def other_gradients_make_no_step():
    """``autograd.grad`` runs through the model without accumulating anything."""
    for name in ("HSDP", "HSDP half reduced", "frozen in part"):
        session = start(mode_named(name))
        tap = make_tap(session)
        session.root.set_requires_gradient_sync(True)
        for step in range(3):
            other_gradients(session, 10 + step, tap, measure=step < 2)
            assert not tap.complete
            assert not tap.aborted
            local = check_step(session, tap, step)
            assert local.reduced is not None
            assert local.micro_squared_norms is None
        tap.remove()


def a_pass_whose_end_is_cut_short_is_not_counted():
    """Wherever Ctrl-C strikes after the reduction, the next step has nothing of this one."""
    session = start(mode_named("1-D"))
    tap = make_tap(session)
    with Cut(function="_end_pass") as end:
        check_step(session, tap, 0)
    assert end.count > 5
    for at in range(end.count):
        with Cut(at, function="_end_pass"), pytest.raises(KeyboardInterrupt):
            train_tapped(session, 1, tap)
        assert tap.aborted
        assert not tap.complete
        session.optimizer.zero_grad()
        check_step(session, tap, 2)
    tap.remove()


def taps_do_not_see_each_others_models():
    original = torch_functions()
    one, other, unwatched = (
        start(mode_named("1-D")),
        start(mode_named("accumulated")),
        start(mode_named("1-D")),
    )
    tap, second = make_tap(one), make_tap(one)
    elsewhere = make_tap(other)
    train_step(unwatched, 0)
    assert not any(each.complete for each in (tap, second, elsewhere))
    exact, _ = local_gradient(one, 1)
    second.begin_forward(measure=True)
    train_tapped(one, 1, tap)
    assert not elsewhere.complete
    for each in (tap, second):
        local = each.collect()
        assert sketch_error(each, local, exact) < EXACT
    optimize(one)
    second.remove()
    check_step(one, tap, 2)
    check_step(other, elsewhere, 3)
    tap.remove()
    assert torch_functions() != original
    elsewhere.remove()
    elsewhere.remove()
    assert torch_functions() == original


SCENARIOS = [
    a_root_that_is_checkpointed,
    *([a_loss_in_chunks_with_backward_passes_of_their_own] if SINCE_TORCH_2_13 else []),
    a_model_that_is_not_sharded_is_refused,
    tied_weights,
    unused_parameters,
    ignored_parameters_are_left_out,
    *([an_aborted_pass_is_not_counted] if SINCE_TORCH_2_13 else []),
    other_gradients_make_no_step,
    a_pass_whose_end_is_cut_short_is_not_counted,
    taps_do_not_see_each_others_models,
]


def attempt_all(rank):
    problems = {}
    for scenario in SCENARIOS:
        try:
            scenario()
        except Exception:
            problems[scenario.__name__] = traceback.format_exc()
    return problems


@pytest.fixture(scope="module")
def problems():
    return run_ranks(attempt_all, 2, timeout=240)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(problems, scenario):
    for of_rank in problems:
        assert of_rank.get(scenario.__name__, "") == ""
