import numpy as np
import pytest
import torch
import torch.distributed as dist

import rankscope
from integrations.adapters import OPTIONS, assert_same_metrics, hold_pages, loud, run_in, run_pages
from rankscope.bus.evidence import Table
from rankscope.integrations.deepspeed import watch
from support.deepspeed_modes import Mode, full_parameters, import_deepspeed, make_engine
from support.models import make_batch, make_model
from support.ranks import on_ranks

pytestmark = pytest.mark.ranks

PAGE = "docs/integrations/deepspeed.md"
STEPS, ACCUMULATE = 4, 2


class LossAlone(torch.nn.Module):
    """A model that returns a loss as a tensor, which no monitor can tell from other outputs."""

    def __init__(self):
        super().__init__()
        self.net = make_model()

    def forward(self, input_ids, labels):
        return self.net(input_ids, labels)["loss"]


def start(rank):
    return make_engine(rank, Mode("", 2, ACCUMULATE), model=LossAlone())


def train(rank, engine, scope=None, *, by_hand=False):
    for number in range(STEPS * ACCUMULATE):
        batch = make_batch(rank, number)
        loss = engine(**batch)
        if by_hand:
            scope.loss(loss, (batch["labels"] != -100).sum())
        engine.backward(loss)
        engine.step()
    if scope is not None:
        scope.close()
    state = {name: value.numpy().tobytes() for name, value in full_parameters(engine).items()}
    state["rng"] = torch.get_rng_state().numpy().tobytes()
    engine.destroy()
    return state


def work(rank, folder):
    engine = start(rank)
    scope = rankscope.watch(engine, run_dir=f"{folder}/hand", **OPTIONS)
    train(rank, engine, scope, by_hand=True)
    engine = start(rank)
    scope = watch(engine, run_dir=f"{folder}/healthy", config={"mine": 1}, **OPTIONS)
    result = {"watched": train(rank, engine, scope), "unwatched": train(rank, start(rank))}
    result["pages"] = run_pages(folder, PAGE)
    dist.barrier()
    return result


trained = on_ranks(work, 2, prepare=import_deepspeed)


def test_a_healthy_training_keeps_its_bits_is_recorded_as_by_hand_and_nothing_is_found(trained):
    run = run_in(trained[1], "healthy")
    assert len(run.columns(Table.STEPS, "step")["step"]) == STEPS
    assert_same_metrics(run, run_in(trained[1], "hand"))
    assert loud(run) == []
    for rank in trained[0]:
        assert rank["watched"] == rank["unwatched"]


def test_the_loss_is_the_one_before_the_engine_divides_it(trained):
    micro = run_in(trained[1], "healthy").columns(Table.MICRO, "loss", "loss_scale", "loss_weight")
    assert np.isfinite(micro["loss"]).all()
    assert np.isfinite(micro["loss_weight"]).all()
    assert set(micro["loss_scale"]) == {1 / ACCUMULATE}


test_a_block_of_a_page_runs, test_an_example_of_a_page_runs = hold_pages(PAGE)


def test_anything_but_an_engine_is_refused():
    with pytest.raises(rankscope.RankscopeError, match="expected the engine that"):
        watch(make_model(), run_dir="nowhere")
