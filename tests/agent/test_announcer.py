import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import rankscope
from rankscope.bus.finding import Finding, FindingEvent, Severity
from rankscope.verdict.news import Announcer
from support.findings import events_of
from support.loops import collect_lines
from support.ranks import on_ranks


def test_consequences_of_another_finding_are_not_printed():
    about = (0, 2), 5, 8, "Ranks 0 and 2 differ.", "Look."
    cause = Finding("state", "state.parameters_differ", Severity.ERROR, *about)
    effect = Finding("rank-0", "data.worker_outlier", Severity.WARNING, *about)
    for known, count in (([cause, effect], 0), ([effect], 1)):
        lines = []
        announcer = Announcer(lambda line, is_fault, lines=lines: lines.append(line))
        announcer.announce([(effect, FindingEvent.OPENED)], known)
        assert len(lines) == count


def train_in_all_ways(rank, folder):
    """Train without a sampler, with shards, and in silence; return what is printed and told."""
    lines, told = collect_lines(), []
    for way in ("forgotten", "healthy", "silent"):
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(480, 8), torch.randint(4, (480,)))
        sampler = DistributedSampler(data) if way == "healthy" else None
        layers = torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
        model = DistributedDataParallel(torch.nn.Sequential(*layers))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"run_dir": f"{folder}/{way}", "announce": way != "silent"}
        if way == "forgotten":
            options["on_finding"] = told.append
        with rankscope.watch(model, optimizer, **options) as scope:
            for _, (inputs, labels) in zip(range(30), DataLoader(data, 8, sampler=sampler)):  # noqa: B905
                loss = F.cross_entropy(model(inputs), labels)
                scope.loss(loss.detach(), len(labels))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    found = [(finding.id, str(finding.severity), finding.status) for finding in told]
    return [line for line in lines if line.startswith("rankscope: ")], found


trained = on_ranks(train_in_all_ways, 2)


def test_a_forgotten_sampler_is_said_when_it_happens_and_at_the_end(trained):
    ((lines, _), (silent, _)), folder = trained
    assert silent == []
    opened, verdict, recorded = lines[:3]
    assert opened.startswith("rankscope: error: Ranks 0 and 1 trained on identical batches")
    assert opened.endswith("[data.duplicate_batches, since step 0]")
    assert verdict.startswith("rankscope: 30 steps of 2 workers: 1 error. Ranks 0 and 1 trained")
    assert recorded.endswith(f"rankscope report {folder / 'forgotten'}")
    found = events_of(folder / "forgotten")
    assert {one["cause"] for one in found} >= {"data.duplicate_batches"}


def test_a_healthy_run_says_one_word_at_the_end_and_silence_can_be_had(trained):
    ((lines, _), _), folder = trained
    verdict, recorded = lines[3:]  # and nothing of the silent run
    assert verdict.startswith("rankscope: 30 steps of 2 workers: no fault found")
    assert recorded.endswith(f"to see it: rankscope report {folder / 'healthy'}")
    assert {one["cause"] for one in events_of(folder / "silent")} >= {"data.duplicate_batches"}


def test_a_finding_that_only_counts_on_is_told_once(trained):
    ((_, first), (_, second)), folder = trained
    assert first == second
    assert ("data.duplicate_batches", "error", "open") in first
    assert len(first) == len(set(first))
    events = events_of(folder / "forgotten")
    assert sum(event["cause"] == "data.duplicate_batches" for event in events) > 1
