import contextlib
import importlib
import logging
import os
import re
import signal
import sys
import types
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import rankscope
from integrations import adapters
from rankscope.bus.evidence import Table
from rankscope.errors import install_command
from rankscope.integrations.beginning import begin
from rankscope.integrations.run_script import ScriptJob
from support.models import make_batch, make_model
from support.ranks import on_ranks

pytestmark = pytest.mark.ranks

PAGE = "docs/integrations/lightning.md"
STEPS, ACCUMULATE = 6, 2


def tokens(batch):
    return (batch["labels"] != -100).sum()


def make_module(**settings):
    """Return a LightningModule; Lightning is imported by ranks alone."""
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self, *, optimizers=1, factor=1):
            super().__init__()
            self.net = make_model()
            self.automatic_optimization = optimizers == 1
            self.num_optimizers = optimizers
            self.factor = factor  # of rank 1's loss

        def on_train_start(self):
            torch.manual_seed(100 + dist.get_rank())

        def forward(self, batch):
            return self.net(**batch)["loss"]

        def training_step(self, batch, batch_idx):
            loss = self(batch)
            return loss * self.factor if dist.get_rank() and self.factor != 1 else loss

        def validation_step(self, batch, batch_idx):
            self.log("validation loss", self(batch))

        def configure_optimizers(self):
            made = [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(self.num_optimizers)]
            return made if len(made) > 1 else made[0]

    return Module(**settings)


def fit(rank, module, callbacks, *, steps=STEPS, accumulate=ACCUMULATE):
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy

    batches = [make_batch(rank, number) for number in range(steps * accumulate)]
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(),
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        barebones=False,
        use_distributed_sampler=False,
        accumulate_grad_batches=accumulate,
        max_steps=steps,
        val_check_interval=steps * accumulate // 2,
        num_sanity_val_steps=1,
    )
    loaders = [
        DataLoader(part, batch_size=None, generator=torch.Generator())
        for part in (batches, batches[:2])
    ]
    trainer.fit(module, *loaders)
    assert trainer.global_step == steps
    assert not {"training_step", "backward"} & vars(trainer.strategy).keys(), "left behind"
    return {**adapters.bits(module), "rng": torch.get_rng_state().numpy().tobytes()}


def train_by_hand(rank, run_dir):
    ddp = DistributedDataParallel(make_module())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    torch.manual_seed(100 + rank)
    scope = rankscope.watch(ddp, optimizer, run_dir=run_dir, **adapters.OPTIONS)
    for step in range(STEPS):
        for micro in range(ACCUMULATE):
            last = micro == ACCUMULATE - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                batch = make_batch(rank, step * ACCUMULATE + micro)
                loss = ddp(batch)
                scope.loss(loss, tokens(batch))
                (loss / ACCUMULATE).backward()
        optimizer.step()
        optimizer.zero_grad()
    scope.close()


def fit_until_terminated(rank, run_dir):
    """Train as under ``rankscope run``, until both ranks get SIGTERM; return the exit's code."""
    from lightning.pytorch import Callback

    class Watched(Callback):
        def on_train_batch_start(self, trainer, *args):
            if trainer.global_step == 0:
                begin(trainer.strategy.model, ScriptJob(run_dir, "train.py"))

        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as caught:
        fit(rank, make_module(), [Watched()], accumulate=1)
    return caught.value.code


def import_lightning():
    warnings.simplefilter("ignore")
    importlib.import_module("lightning.pytorch")


def work(rank, folder):
    os.environ["LOCAL_RANK"] = str(rank)  # as under a launcher
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    from rankscope.integrations.lightning import RankscopeCallback

    def callback(name):
        return RankscopeCallback(f"{folder}/{name}", weight=tokens, **adapters.OPTIONS)

    ended = fit_until_terminated(rank, f"{folder}/terminated")
    train_by_hand(rank, f"{folder}/by hand")
    watched = fit(rank, make_module(), [callback("healthy")])
    result = {"terminated": ended, "watched": watched, "unwatched": fit(rank, make_module(), [])}
    for factor in (2, 8):
        multiplied = RankscopeCallback(f"{folder}/factor {factor}", **adapters.OPTIONS)
        fit(rank, make_module(factor=factor), [multiplied], accumulate=1)
    with pytest.raises(rankscope.RankscopeError) as caught:
        fit(rank, make_module(optimizers=2), [callback("two")], steps=2, accumulate=1)
    result["two optimizers"] = str(caught.value)
    result["pages"] = adapters.run_pages(folder, PAGE)
    dist.barrier()
    return result


trained = on_ranks(work, 2, prepare=import_lightning)


def test_a_healthy_training_keeps_its_bits_is_recorded_as_by_hand_and_nothing_is_found(trained):
    ranks, folder = trained
    run = adapters.run_in(folder, "healthy")
    assert run.status == "complete"
    assert len(run.columns(Table.STEPS, "step")["step"]) == STEPS, "validation is not recorded"
    # Lightning validates with DDP around the module, which sends rank 0's buffers to all.
    adapters.assert_same_metrics(run, adapters.run_in(folder, "by hand"), without=["buffer_digest"])
    assert adapters.loud(run) == []
    assert run.info["config"]["accumulate_grad_batches"] == ACCUMULATE
    for rank in ranks:
        assert rank["watched"] == rank["unwatched"]


@pytest.mark.parametrize("factor", [2, 8])
def test_a_factor_of_one_workers_loss_is_named(trained, factor):
    found = rankscope.Run.open(trained[1] / f"factor {factor}").findings()
    [finding] = [one for one in found if one.cause.startswith("loss.")]
    assert finding.id == "loss-scale-one-worker"
    assert f"rank 1 has a factor before backward that is {factor} times rank 0's" in (
        finding.explanation
    )


def test_several_optimizers_are_refused(trained):
    for rank in trained[0]:
        assert "expected one optimizer, got 2" in rank["two optimizers"]


def test_a_training_that_a_signal_ends_is_incomplete_though_it_exits_with_0(trained):
    ranks, folder = trained
    assert [rank["terminated"] for rank in ranks] == [None, None]
    run = adapters.run_in(folder, "terminated")
    assert run.status == "incomplete"
    assert run.columns(Table.STEPS, "step")["step"].tolist() == [0, 1, 2]
    assert {end["why"] for end in run.info["ended"]} == {"its training raised SIGTERMException"}


test_a_block_of_a_page_runs, test_an_example_of_a_page_runs = adapters.hold_pages(PAGE)


def test_without_lightning_it_says_what_to_install_and_hides_no_other_failure(monkeypatch):
    monkeypatch.delitem(sys.modules, "rankscope.integrations.lightning", raising=False)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", types.ModuleType("lightning.pytorch"))
    with pytest.raises(ImportError, match="cannot import name 'Callback'"):
        importlib.import_module("rankscope.integrations.lightning")
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(rankscope.RankscopeError, match=re.escape(install_command("lightning"))):
        importlib.import_module("rankscope.integrations.lightning")
