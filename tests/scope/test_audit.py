"""The audit on real ranks, against the distance of every element from the mean in float64."""

import numpy as np
import pytest
import torch

from rankscope import Run
from rankscope.bus.evidence import Table
from rankscope.bus.groups import cut_sections, group_parameters
from rankscope.verdict.diagnosis import diagnose_run
from support.audited import (
    ODD_RANK,
    ODD_STEP,
    SECTION_ELEMENTS,
    STEPS,
    Case,
    train_cases,
)
from support.ranks import run_ranks

BF16 = torch.bfloat16
DDP = [
    Case("accumulated", accumulate=3),
    Case("unused on one rank", unused="some"),
    Case("in bfloat16", hook="bfloat16", rounds=True),
    Case("one element", hook="one element"),
]
SHARDED = [
    Case("FSDP2 in bfloat16", "FSDP2", reduce_dtype=BF16, expected_type="bfloat16", rounds=True),
    Case("FSDP2 accumulated", "FSDP2", accumulate=2),
]
REPLICAS = [
    Case("HSDP in bfloat16", "HSDP", reduce_dtype=BF16, expected_type="bfloat16", rounds=True),
]
RUNS = [(case, 3) for case in DDP + SHARDED] + [(case, 4) for case in REPLICAS]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit")
    results = {}
    for cases, width in ((DDP + SHARDED, 3), (REPLICAS, 4)):
        ranks = run_ranks(train_cases, width, cases, str(folder))
        for case in cases:
            results[case.name] = [rank[case.name] for rank in ranks], Run.open(folder / case.name)
    return results


def truth(ranks, step):
    """Return residuals by worker and group ``[W, G]``, and in all ``[W]``, and the groups."""
    sizes = {name: len(values) for name, values in ranks[0][step]["local"].items()}
    groups = group_parameters(sizes)
    sections = cut_sections(sizes, groups, section_elements=SECTION_ELEMENTS)
    assert sections.counts == (3, 3, 3, 1)
    assert len(sections.ranges["layers.0.weight"]) == 3
    residuals_WG, totals_W = np.zeros((len(ranks), len(groups))), np.zeros(len(ranks))
    for worker, own in enumerate(ranks):
        squares, norms = np.zeros(len(sections)), np.zeros(len(sections))
        for name, ranges in sections.ranges.items():
            mean = np.mean([rank[step]["local"][name] for rank in ranks], axis=0)
            reduced = own[step]["reduced"][name]
            for section, start, stop in ranges:
                squares[section] += np.sum((reduced - mean)[start:stop] ** 2)
                norms[section] += np.sum(reduced[start:stop] ** 2)
        each = np.sqrt(np.divide(squares, norms, out=np.zeros_like(norms), where=norms > 0))
        totals_W[worker] = np.sqrt(squares.sum() / norms.sum())
        for group in range(len(groups)):
            residuals_WG[worker, group] = each[np.array(sections.group_of) == group].max()
    return residuals_WG, totals_W, groups.names


@pytest.mark.parametrize(("case", "width"), RUNS, ids=[case.name for case, _ in RUNS])
def test_residuals_are_those_of_the_elements(trained, case, width):
    ranks, run = trained[case.name]
    layers = ("layers.0", "layers.1", "branch", "head")
    assert run.info["options"]["reduced_in"] == dict.fromkeys(layers, case.expected_type)
    reports = list(run.iter_reports())
    recorded = run.columns(Table.STEPS, "reduction_residual")["reduction_residual"]
    assert len(reports) == STEPS
    for step, report in enumerate(reports):
        exact_WG, exact_W, names = truth(ranks, step)
        found_WG = report.gathered.residuals_WG
        assert report.gathered.groups == names
        assert found_WG.shape == (width, len(names))
        if case.rounds:
            assert exact_WG.min() > 1e-4
            np.testing.assert_allclose(found_WG, exact_WG, rtol=0.2)
            np.testing.assert_allclose(recorded[step], exact_W.max(), rtol=0.2)
        elif case.hook and step == ODD_STEP:
            assert exact_WG[ODD_RANK, 0] > 1e-3
            np.testing.assert_allclose(
                found_WG[ODD_RANK, 0], exact_WG[ODD_RANK, 0], rtol=0.2
            )  # 4.5 % RMS
            found_WG = found_WG.copy()
            found_WG[ODD_RANK, 0] = 0.0
            assert found_WG.max() < 5e-6
        else:
            assert exact_WG.max() < 5e-7
            assert found_WG.max() < 5e-6
            assert recorded[step] < 5e-6


@pytest.mark.parametrize("case", [case for case, _ in RUNS], ids=[case.name for case, _ in RUNS])
def test_findings_are_those_of_what_happened_live_and_from_the_record(trained, case):
    _, run = trained[case.name]
    live, again = run.findings(), diagnose_run(run)
    assert {(f.id, f.cause, f.ranks, f.groups, f.first_step) for f in live} == {
        (f.id, f.cause, f.ranks, f.groups, f.first_step) for f in again
    }
    told = {f.cause for f in again} & {"numerics.reduction_error"}
    assert bool(told) == (bool(case.hook))  # narrow types that were meant are none
