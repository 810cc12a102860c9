"""Transformers' ``Trainer``, TRL's ``SFTTrainer`` and Accelerate, watched on two real ranks."""

import importlib
import logging
import os
import warnings

import numpy as np
import pytest
import torch.distributed as dist

import rankscope
from integrations.adapters import assert_same_metrics, bits, hold_pages, loud, run_in, run_pages
from rankscope.bus.evidence import Table
from support.loops import collect_warnings
from support.ranks import on_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

PAGES = [f"docs/integrations/{name}.md" for name in ("transformers", "accelerate")]


def import_all():
    warnings.simplefilter("ignore")
    importlib.import_module("integrations.hugging_face_jobs")


def work(rank, folder):
    os.environ.update(  # as under a launcher
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        OMP_NUM_THREADS="1",
        MASTER_ADDR="localhost",
        MASTER_PORT="1",
        HF_HUB_OFFLINE="1",
    )
    said = collect_warnings()
    from integrations import hugging_face_jobs as jobs

    logging.getLogger("transformers").setLevel(logging.ERROR)
    results = {
        **with_trainer(rank, folder, jobs),
        **with_sft(rank, folder, jobs),
        **with_accelerate(rank, folder, jobs),
        "said": list(said),
    }
    results["pages"] = run_pages(folder, *PAGES, before=jobs.start_again)
    dist.barrier()
    return results


def callback(run_dir, jobs, **options):
    from rankscope.integrations.transformers import RankscopeCallback

    return RankscopeCallback(run_dir, **{**jobs.OPTIONS, **options})


def with_trainer(rank, folder, jobs):
    results = {}
    plain = jobs.make_trainer(folder, kind=jobs.KeepingTrainer)
    plain.train()
    watched = jobs.make_trainer(folder, [callback(f"{folder}/trainer", jobs)])
    watched.train()
    jobs.train_by_hand(f"{folder}/trainer by hand", jobs.make_model(), plain.kept, jobs.model_loss)
    results["trainer"] = bits(plain.model), bits(watched.model)
    results["left behind"] = sorted(vars(watched).keys() - vars(plain).keys())
    own = {"compute_loss_func": jobs.mean_over_own}
    settings = {"gradient_accumulation_steps": 1, "max_steps": 10}
    watching = [callback(f"{folder}/mean over own", jobs)]
    jobs.make_trainer(folder, watching, more=own, **settings).train()
    twice = callback(f"{folder}/twice", jobs)
    settings = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    trainer = jobs.make_trainer(folder, [twice], **settings)
    trainer.train()
    trainer.train()
    breaking = jobs.make_trainer(folder, [callback(f"{folder}/breaking", jobs)], kind=jobs.Breaking)
    with pytest.raises(ZeroDivisionError):
        breaking.train()
    results["left behind"] += sorted(vars(breaking).keys() - vars(plain).keys())
    return results


def with_sft(rank, folder, jobs):
    plain = jobs.make_sft_trainer(folder)
    plain.train()
    watched = jobs.make_sft_trainer(folder, [callback(f"{folder}/sft", jobs)])
    watched.train()
    by_hand = jobs.make_sft_trainer(folder)
    by_hand.create_optimizer()
    run_dir = f"{folder}/sft by hand"
    jobs.train_by_hand(run_dir, by_hand.model, plain.kept, jobs.fused_loss, by_hand.optimizer)
    return {"sft": (bits(plain.model), bits(watched.model))}


def with_accelerate(rank, folder, jobs):
    from accelerate.state import PartialState

    from rankscope.integrations.accelerate import watch

    def adapter(run_dir):
        def begin(accelerator, model, optimizer, loader):
            return watch(accelerator, model, optimizer, loader=loader, run_dir=run_dir, **options)

        return begin

    def by_hand(accelerator, model, optimizer, loader):
        run_dir = f"{folder}/accelerate by hand"
        return rankscope.watch(model, optimizer.optimizer, run_dir=run_dir, **options)

    options = jobs.OPTIONS
    PartialState.destroy_process_group = lambda *_: None  # other trainings follow
    _, unwatched, _ = jobs.train_with_accelerate(lambda *_: None)
    accelerator, watched, _ = jobs.train_with_accelerate(adapter(f"{folder}/accelerate"))
    accelerator.end_training()
    jobs.train_with_accelerate(by_hand)[2].close()
    return {"accelerate": (bits(unwatched), bits(watched))}


trained = on_ranks(work, 2, timeout=240, prepare=import_all)


@pytest.mark.parametrize("name", ["trainer", "sft", "accelerate"])
def test_a_healthy_training_keeps_its_bits_is_recorded_as_by_hand_and_nothing_is_found(
    trained, name
):
    ranks, folder = trained
    run = run_in(folder, name)
    assert_same_metrics(run, run_in(folder, f"{name} by hand"))
    assert loud(run) == []
    for rank in ranks:
        unwatched, watched = rank[name]
        assert unwatched == watched
        assert len(watched) > 10
    _, scales_TW = run.per_worker("grad_scale")
    assert scales_TW.shape == (6, 2)
    np.testing.assert_allclose(scales_TW.mean(axis=1), 1, rtol=1e-6)


def test_losses_outside_of_the_model_are_those_that_the_model_would_compute(trained):
    folder, name = trained[1], "sft"
    for signal, within in (("loss", 1e-4), ("loss_weight", 0), ("grad_scale", 1e-6)):
        expected = run_in(folder, "trainer").per_worker(signal)[1]
        found = run_in(folder, name).per_worker(signal)[1]
        np.testing.assert_allclose(found, expected[: len(found)], rtol=within)


def test_a_loss_that_is_multiplied_by_the_number_of_workers_is_found(trained):
    [finding] = [
        f for f in run_in(trained[1], "mean over own").findings() if f.cause == "loss.scale"
    ]
    assert finding.severity > rankscope.Severity.NOTE
    assert finding.evidence["multiplier"] == pytest.approx(2)


def test_evaluation_is_not_recorded_and_a_second_training_goes_on_beside_the_first(trained):
    _, folder = trained
    first, second = run_in(folder, "twice"), run_in(folder, "twice-2")
    assert first.per_worker("num_samples")[1].tolist() == [[4, 4]] * 3
    assert second.info["continues"] == "twice"
    assert second.columns(Table.STEPS, "step")["step"].tolist() == [3, 4, 5]
    assert first.info["status"] == second.info["status"] == "complete"


def test_a_training_that_raises_leaves_an_incomplete_run_and_a_trainer_as_it_was(trained):
    ranks, folder = trained
    run = run_in(folder, "breaking")
    assert run.info["status"] == "incomplete"
    assert run.columns(Table.STEPS, "step")["step"].tolist() == [0, 1]
    assert [rank["left behind"] for rank in ranks] == [[], []]


def test_arguments_and_loader_are_recorded(trained):
    info = run_in(trained[1], "trainer").info
    assert info["config"]["gradient_accumulation_steps"] == 2
    assert info["config"]["average_tokens_across_devices"] is True
    assert info["training"]["loader"]["dataset"]["length"] == 192
    assert [rank["sampler_seed"] for rank in info["ranks"]] == [1, 1]
    assert "vocabulary" in run_in(trained[1], "sft").info["ranks"][0]["environment"]


test_a_block_of_a_page_runs, test_an_example_of_a_page_runs = hold_pages(*PAGES)


def test_the_monitor_has_nothing_to_warn_of(trained):
    ranks, folder = trained
    assert ranks[1]["said"] == []
    warned = [text for text in ranks[0]["said"] if not text.startswith("rankscope: ")]
    assert [text.partition(" already")[0] for text in warned] == [f"{folder}/twice"]
