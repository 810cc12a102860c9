"""Digests of state on real ranks."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope import Run, Severity
from support.loops import collect_warnings
from support.ranks import run_ranks


class Counting(nn.Module):
    """Keeps a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += x.detach().mean()
        return x


def convolutional(*, counting):
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
        Counting() if counting else nn.Identity(),
    )


NORMALISED = {
    "while accumulating and evaluating": None,
    "with a buffer of another kind": "9.seen",
    "with broadcasts that send nothing": "1.running_mean",
    "without broadcasts": None,
}
"""Ways to train with batch normalisation, and what differs where it should not."""


def _normalise_on_rank(rank, folder):
    told = {}
    for name in NORMALISED:
        model = convolutional(counting="a buffer" in name)
        options = {"broadcast_buffers": False} if name == "without broadcasts" else {}
        ddp = DistributedDataParallel(model, **options)
        if "send nothing" in name:
            ddp._sync_module_buffers = lambda authoritative_rank: None
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        warnings = collect_warnings()
        torch.manual_seed(rank)
        scope = rankscope.watch(ddp, optimizer, run_dir=f"{folder}/{name}", canary=False)
        for step in range(16):
            share = 1.0
            if "accumulating" in name:
                share = 0.5
                with ddp.no_sync():
                    (ddp(torch.randn(4, 3, 6, 6)).square().mean() * share).backward()
            (ddp(torch.randn(4, 3, 6, 6)).square().mean() * share).backward()
            optimizer.step()
            optimizer.zero_grad()
            if "evaluating" in name and step % 3 == 2:
                ddp.eval()
                with torch.no_grad():
                    ddp(torch.randn(4, 3, 6, 6))
                ddp.train()
        scope.close()
        told[name] = warnings
    return told


@pytest.mark.ranks
def test_running_statistics_may_drift_apart_between_two_broadcasts(tmp_path):
    for warnings in run_ranks(_normalise_on_rank, 2, str(tmp_path), timeout=240):
        assert warnings == {name: [] for name in NORMALISED}
    for name, wrong in NORMALISED.items():
        findings = {finding.id: finding for finding in Run.open(tmp_path / name).findings()}
        error = findings.pop("state.buffers_differ", None)
        assert (error is None) == (wrong is None), name
        if error is not None:
            assert error.severity is Severity.ERROR
            assert wrong in error.evidence["names"][0]
        assert [one.id for one in findings.values() if one.severity > Severity.NOTE] == []
        assert "running-statistics" in findings, name
