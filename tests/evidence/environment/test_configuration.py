import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope import Run
from rankscope.bus.environment import compare_settings, different_settings, plain_settings
from rankscope.bus.finding import Severity
from rankscope.evidence.environment.judge import CAUSE, CONFIGURED, DifferentConfiguration
from support.ranks import on_ranks
from support.stepping import run, words

RANKS, ODD = 3, 1


def settings(width=4, **odd):
    usual = dict.fromkeys(odd, "usual")
    return [usual] * (width - 1) + [odd]


@pytest.mark.parametrize(
    ("name", "severity"),
    [
        ("TrainingArguments.label_smoothing_factor", Severity.WARNING),
        ("TrainingArguments.seed", Severity.WARNING),
        ("DeepSpeed.gradient_clipping", Severity.WARNING),
        ("config.model.dropout", Severity.WARNING),
        ("config.seed", Severity.NOTE),  # a rank may draw dropout with its own
        ("TrainingArguments.dataloader_num_workers", Severity.NOTE),
    ],
)
def test_a_setting_of_one_rank_is_named_with_both_values(name, severity):
    [found] = run(DifferentConfiguration(settings(**{name: "odd"})), 5)
    assert (found.cause, found.key, found.severity) == (CAUSE, CONFIGURED, severity)
    assert found.ranks == (3,)
    owner, _, field = name.partition(".")
    assert f"{field} of {owner} is odd on rank 3, usual on the others" in words(found)


def test_ranks_that_lack_a_setting_are_not_compared():
    ranks_W = different_settings([{"A.lr": 1.0}, {}, {"A.lr": 1}, {"A.lr": 2.0, "A.eps": 1e-8}])
    assert ranks_W == [{"A.lr": 1.0}, {}, {"A.lr": 1}, {"A.lr": 2.0}]
    assert compare_settings(ranks_W)[0] == (3,)
    assert compare_settings(())[0] == ()


def test_a_users_number_of_the_rank_is_no_setting():
    assert different_settings([{"config.part": n} for n in range(4)]) == [{}] * 4
    assert different_settings([{"A.part": n} for n in range(4)]) != [{}] * 4


def test_what_the_user_repeats_of_a_framework_is_named_once():
    both = settings(**{"TrainingArguments.seed": 2, "config.seed": 2})
    assert len(compare_settings(both)[1]) == 1


def test_what_every_rank_has_for_itself_is_left_out():
    given = {
        "local_rank": 3,
        "logging_steps": 5,
        "outputDir": "runs",
        "data": "/mnt/3/data",
        "api_key": "secret",
        "lr": 0.1,
        "betas": [0.9, 0.99],
        "kind": None,
    }
    assert plain_settings(given, "config") == {
        "config.api_key": "…",
        "config.lr": 0.1,
        "config.betas.0": 0.9,
        "config.betas.1": 0.99,
        "config.kind": "None",
    }


def train(rank, folder):
    for name, differ in (("healthy", False), ("odd", True)):
        odd = differ and rank == ODD
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(8, 4))
        loss_of = nn.CrossEntropyLoss(label_smoothing=0.1 if odd else 0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3 if odd else 2)
        config = {"rank": rank, "out": f"/tmp/{rank}", "model": {"dropout": 0.2 if odd else 0.1}}
        options = {"run_dir": f"{folder}/{name}", "config": config, "announce": False}
        with rankscope.watch(model, optimizer, **options):
            for step in range(6):
                draw = torch.Generator().manual_seed(10 * step + rank)
                inputs = torch.randn(16, 8, generator=draw)
                labels = torch.randint(4, (16,), generator=draw)
                optimizer.zero_grad()
                loss_of(model(inputs), labels).backward()
                optimizer.step()
                schedule.step()


trained = on_ranks(train, RANKS)


@pytest.mark.ranks
def test_real_ranks_name_loss_schedule_and_the_users_setting(trained):
    record = Run.open(trained[1] / "odd")
    [found] = [each for each in record.findings() if each.id == CONFIGURED]
    assert (found.severity, found.ranks) == (Severity.WARNING, (ODD,))
    for text in (
        "label_smoothing of CrossEntropyLoss is 0.1 on rank 1, 0.0 on the others",
        "step_size of StepLR is 3 on rank 1, 2 on the others",
        "model.dropout of config is 0.2 on rank 1, 0.1 on the others",
    ):
        assert text in found.explanation


@pytest.mark.ranks
def test_equal_settings_are_silent(trained):
    record = Run.open(trained[1] / "healthy")
    assert [each.id for each in record.findings() if each.cause == CAUSE] == []
    assert [rank["settings"] for rank in record.info["ranks"]] == [{}] * RANKS
