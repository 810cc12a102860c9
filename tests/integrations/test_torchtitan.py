"""The adapter for loops of torchtitan's shape, on two real ranks that run the example's loop."""

import pytest
import torch
import torch.distributed as dist
from examples.torchtitan_style import Config, ParallelDims, Trainer

import rankscope
from integrations.adapters import OPTIONS, assert_same_metrics, hold_pages, loud, run_in, run_pages
from rankscope.bus.evidence import Table
from rankscope.integrations.torchtitan import watch
from support.ranks import on_ranks

pytestmark = pytest.mark.ranks

PAGE = "docs/integrations/torchtitan.md"
STEPS, ACCUMULATE = 8, 2
WATCH = {**OPTIONS, "plan": {"loss_weighting": "token"}}
FSDP = ParallelDims(dp_replicate=1, dp_shard=2)


def make_trainer():
    trainer = Trainer(Config(FSDP, steps=STEPS, gradient_accumulation_steps=ACCUMULATE))
    torch.manual_seed(100 + dist.get_rank())
    return trainer


def run(trainer):
    trainer.train()
    trainer.close()
    [model] = trainer.model_parts
    state = {name: p.to_local().detach().numpy().tobytes() for name, p in model.named_parameters()}
    return {**state, "rng": torch.get_rng_state().numpy().tobytes()}


def watch_by_hand(trainer, run_dir):
    [model], [optimizer] = trainer.model_parts, trainer.optimizers.optimizers
    scope = rankscope.watch(model, optimizer, run_dir=run_dir, **WATCH)
    loss_fn = trainer.loss_fn

    def instrumented(pred, labels):
        total, tokens = loss_fn(pred, labels), (labels != -100).sum()
        scope.loss(total.detach().double() / tokens, tokens)
        return total

    trainer.loss_fn = instrumented
    return scope


def work(rank, folder):
    trainer = make_trainer()
    scope = watch_by_hand(trainer, f"{folder}/hand")
    run(trainer)
    scope.close()
    trainer = make_trainer()
    watch(trainer, run_dir=f"{folder}/healthy", **WATCH)
    result = {"watched": run(trainer), "unwatched": run(make_trainer())}
    trainer = make_trainer()
    watch(trainer, run_dir=f"{folder}/raising", **WATCH)
    trainer.loss_fn = None
    try:
        trainer.train()
    except TypeError:
        trainer.close()
    result["pages"] = run_pages(folder, PAGE)
    dist.barrier()
    return result


trained = on_ranks(work, 2)


def test_a_healthy_training_keeps_its_bits_is_recorded_as_by_hand_and_nothing_is_found(trained):
    healthy = run_in(trained[1], "healthy")
    assert len(healthy.columns(Table.STEPS, "step")["step"]) == STEPS
    assert_same_metrics(healthy, run_in(trained[1], "hand"))
    assert loud(healthy) == []
    assert healthy.info["config"] == {
        "framework": "torchtitan's shape",
        "dp_replicate": 1,
        "dp_shard": 2,
        "gradient_accumulation_steps": ACCUMULATE,
    }
    for rank in trained[0]:
        assert rank["watched"] == rank["unwatched"]


def test_a_training_that_raised_is_incomplete(trained):
    assert run_in(trained[1], "raising").status == "incomplete"
    assert run_in(trained[1], "healthy").status == "complete"


test_a_block_of_a_page_runs, test_an_example_of_a_page_runs = hold_pages(PAGE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss_fn": None}, "without loss_fn"),
        ({"model_parts": [1, 2]}, "one model part on each rank, got 2"),
    ],
)
def test_another_shape_is_refused(change, words):
    members = {
        "model_parts": [],
        "optimizers": type("Container", (), {"optimizers": []}),
        "loss_fn": print,
        "forward_backward_step": lambda self, global_valid_tokens: None,
        "close": print,
    }
    members = {name: value for name, value in {**members, **change}.items() if value is not None}
    with pytest.raises(rankscope.RankscopeError, match=words):
        watch(type("Trainer", (), members)(), run_dir="nowhere")
