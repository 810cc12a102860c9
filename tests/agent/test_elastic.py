"""A job that its launcher starts again goes on in a run of its own, where the first one ended."""

import socket

import pytest

from rankscope import Run
from rankscope.bus.evidence import Table
from support.forked_ranks import torchrun

JOB = """
import os, sys, torch, torch.distributed as dist
from rankscope.wrappers import rendezvous
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import rankscope

torch.set_num_threads(1)
attempt, port = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["MASTER_PORT"])
store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)
own = dist.PrefixStore(attempt, store)  # else gloo itself may find addresses of the first attempt
rank, first = int(os.environ["RANK"]), attempt == "0"
dist.init_process_group("gloo", store=own, rank=rank, world_size=2)
rendezvous.default_store = lambda: store  # but the monitor gets what torchrun keeps over restarts
model = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scope = rankscope.watch(model, optimizer, run_dir=sys.argv[1], agent="process")
for step in range(30):
    if first and step == 20 and rank == 1:
        os._exit(3)
    torch.manual_seed(step)  # the same batch on both
    loss = model(torch.randn(8, 8)).pow(2).mean()
    loss.backward()
    scope.loss(loss.detach(), weight=8)
    optimizer.step()
    optimizer.zero_grad()
scope.close()
"""


@pytest.mark.slow
def test_the_next_attempt_goes_on_where_the_first_one_ended(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
    options = ["--nproc-per-node", "2", "--max-restarts", "1", "--master-port", str(port)]
    code, _, err = torchrun(options, str(tmp_path / "job.py"), str(tmp_path / "run"))
    assert code == 0, err
    first, second = Run.open(tmp_path / "run"), Run.open(tmp_path / "run-2")
    assert (first.status, second.status) == ("incomplete", "complete")
    ended = first.info["ended"][0]
    assert (ended["rank"], ended["last_step"]) == (1, 18)
    assert first.columns(Table.STEPS, "step")["step"].tolist() == list(range(19))
    assert (second.info["continues"], second.info["first_step"]) == ("run", 19)
    assert second.columns(Table.STEPS, "step")["step"].tolist() == list(range(19, 49))
    known = {finding.id for finding in first.findings()}
    assert "data.duplicate_batches" in known
    assert known <= {finding.id for finding in second.findings()}
