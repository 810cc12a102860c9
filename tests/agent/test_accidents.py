import os
import signal
import socket
import time
from functools import partial

import numpy as np
import pytest
import torch.distributed as dist

from rankscope import Run
from rankscope.agent import link
from rankscope.agent.frames import unread_bytes
from rankscope.bus.evidence import Table
from rankscope.report.live.catalog import ListedPlace, glance, stamp
from rankscope.verdict.assessment import assess
from support.accidents import Job, state_of, train, wait_until
from support.forked_ranks import torchrun
from support.loops import Loop
from support.ranks import on_ranks

# A rank, or all of them, are killed -----------------------------------------------------------


def train_for_ever(folder, rank, counter):
    train(Loop(rank, str(folder / "run"), agent="process"), counter)


@pytest.mark.parametrize("victims", [(0, 1), (1,)], ids=["all", "one"])
def test_no_delivered_step_is_lost_when_ranks_are_killed(tmp_path, victims):
    with Job(tmp_path / "job", train_for_ever) as job:
        job.wait_for_steps(15)
        killed = job.kill(*victims)
        job.wait_for_agent()
        ended = time.time()
        run = Run.open(job.run_dir)
        assert run.status == "incomplete"
        recorded = run.columns(Table.STEPS, "step")["step"].tolist()
        assert recorded == list(range(len(recorded)))
        assert min(job.done) - 1 <= len(recorded) <= max(job.done)
        endings = run.info["ended"]
        # Where the survivor has delivered a step more, the run ends before the survivor does.
        assert {*victims} <= {ending["rank"] for ending in endings}
        assert endings[0]["rank"] in victims or endings[0]["last_step"] == endings[1]["last_step"]
        assert min(ending["last_step"] for ending in endings) == recorded[-1]
        assert all(killed - 1 <= ending["time"] <= ended for ending in endings)
    left = {path.name for path in job.run_dir.iterdir() if "tmp" in path.name}
    assert not left


def test_a_run_of_which_nobody_is_left_is_interrupted(tmp_path):
    with Job(tmp_path / "job", train_for_ever) as job:
        job.wait_for_steps(15)
        wait_until(lambda: Run.open(job.run_dir).table(Table.STEPS).num_rows > 5)
        assert Run.open(job.run_dir).status == "running"
        place = ListedPlace("run", job.run_dir, "run")
        before = stamp(place, tmp_path)
        os.kill(job.agent, signal.SIGSTOP)
        assert Run.open(job.run_dir).status == "running"
        job.kill(0, 1)
        os.kill(job.agent, signal.SIGKILL)
        wait_until(lambda: Run.open(job.run_dir).status == "interrupted")
        assert job.info()["status"] == "running"
        assert glance(place, stamp(place, tmp_path)).state(time.time()) == "interrupted"
        assert before != stamp(place, tmp_path)
        assert "The record ends early" in assess(Run.open(job.run_dir)).headline


def lose_the_connection(folder, rank, counter):
    """Close the socket of rank 1 for good, as a script does that closes what it does not know."""
    loop = Loop(rank, str(folder / "run"), agent="process")
    for step in range(STEPS):
        if rank == 1 and step == HIT:
            wait_until(partial(has_greeted, loop))
            loop.scope._link._socket.shutdown(socket.SHUT_RDWR)
        loop.step(step)
        counter.value = step
    wait_until(lambda: Run.open(folder / "run").status == "incomplete")
    loop.close()


def test_a_rank_that_lost_its_connection_is_not_called_ended(tmp_path):
    with Job(tmp_path / "job", lose_the_connection) as job:
        job.wait_for_steps(1)
        job.results()
        (why,) = [end["why"] for end in job.info()["ended"] if end["rank"] == 1]
        assert why == "its connection was lost, though its process lives"


# The agent is stopped, or killed ----------------------------------------------------------------

STEPS, HIT = 30, 10


def stop_for_a_while(loop, step, agent):
    if step == HIT:
        os.kill(agent, signal.SIGSTOP)
    elif step == HIT + 10:
        os.kill(agent, signal.SIGCONT)


def stop_for_ever(loop, step, agent):
    if step == HIT:
        os.kill(agent, signal.SIGSTOP)


def kill_agent(loop, step, agent):
    if step == HIT:
        wait_until(lambda: Run.open(loop.scope.run_dir).table(Table.STEPS).num_rows > 5)
        os.kill(agent, signal.SIGKILL)


def has_greeted(loop):
    """Return whether the agent runs, with or without a finding; steps need not wait for that."""
    return loop.scope.findings is not None and loop.scope.traffic.received > 0  # findings reads


def let_agents_catch_up(loop, step):
    """Wait until what both ranks have sent is read, so that the next steps find room."""
    if step == HIT:
        place = loop.scope._link._socket
        wait_until(lambda: place is None or not unread_bytes(place))
        dist.barrier()


LIMITS = {
    "crowded": {"_SEND_BUFFER": 1 << 12, "ROOM_BYTES": 1},
    "stopped": {"SILENT_SECONDS": link.SILENT_SECONDS},
    "too full": {"_SEND_BUFFER": 1 << 16, "MOST_BYTES": link.MOST_BYTES},
}
"""Of links, in each case."""
STOPPED = {"stopped": ("SILENT_SECONDS", 0.3), "too full": ("MOST_BYTES", 20_000)}
"""The limit of the links from the moment on at which their agent is stopped."""


def accidents(rank, folder):
    found = {}
    cases = {
        "untouched": lambda loop, step, agent: None,
        "stopped for a while": stop_for_a_while,
        "crowded": stop_for_a_while,
        "stopped": stop_for_ever,
        "too full": stop_for_ever,
        "stopped at the end": stop_for_ever,
        "killed": kill_agent,
    }
    for name, happens in cases.items():
        limits = LIMITS.get(name, {})
        defaults = {limit: getattr(link, limit) for limit in limits}
        for limit, value in limits.items():
            setattr(link, limit, value)
        loop = Loop(rank, f"{folder}/{name}", agent="process", flush_seconds=0.05)
        started = loop.scope._handle.agent
        wait_until(partial(has_greeted, loop))
        for step in range(STEPS):
            let_agents_catch_up(loop, step)
            if started is not None:
                happens(loop, step, started.pid)
            if name in STOPPED and step == HIT:
                setattr(link, *STOPPED[name])
            if name == "stopped":
                time.sleep(0.05)
            loop.step(step)
        loop.close()
        if started is not None and name != "killed":
            wait_until(lambda pid=started.pid: state_of(pid) in ("", "Z"), 60)
        found[name] = loop.bits(), loop.warnings
        for limit, value in defaults.items():
            setattr(link, limit, value)
    loop = Loop(rank, None)
    for step in range(STEPS):
        loop.step(step)
    found["unwatched"] = loop.bits(), []
    return found


hit = on_ranks(accidents, 2)


def test_the_training_keeps_its_bits_whatever_happens_to_the_agent(hit):
    found, _ = hit
    for own in found:
        for name, (bits, _) in own.items():
            assert bits == own["unwatched"][0], name


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("untouched", None),
        ("stopped for a while", None),
        ("stopped at the end", None),
        ("stopped", "the monitor's agent has taken nothing for"),
        ("too full", "the monitor's agent has taken nothing for"),
        ("killed", "the monitor's agent has ended"),
    ],
)
def test_it_is_said_once_that_an_agent_is_lost(hit, name, said):
    """By the rank that has started it; another may find out by itself that it takes nothing."""
    found, _ = hit
    first, second = (own[name][1] for own in found)
    assert len(first) == (said is not None), first
    assert len(second) <= (said is not None and name != "killed"), second
    assert all("training goes on" in warning for warning in (*first, *second))
    assert said is None or said in first[0]


@pytest.mark.parametrize("name", ["untouched", "stopped for a while", "stopped at the end"])
def test_an_agent_that_goes_on_catches_up(hit, name):
    """At the latest when its training closes: that wakes it."""
    _, folder = hit
    run, other = Run.open(folder / name), Run.open(folder / "untouched")
    assert run.status == "complete"
    columns = [each.columns(Table.STEPS, "step", "observed", "loss_mean") for each in (run, other)]
    for one, two in zip(*(each.values() for each in columns), strict=True):
        np.testing.assert_array_equal(one, two)


def test_gradients_that_found_no_room_are_counted_and_said_once(hit):
    found, folder = hit
    for rank, own in enumerate(found):
        (warning,) = own["crowded"][1]
        assert f"does not keep up with rank {rank}: the gradient of step" in warning
    run = Run.open(folder / "crowded")
    assert run.status == "complete"
    _, norms_TW = run.per_worker("grad_norm")
    for rank in range(2):
        left_out = run.info["without_room"][str(rank)]
        assert left_out == np.isnan(norms_TW[:, rank]).sum() > 0
        assert any(
            f"rank {rank} was left out in {left_out} step" in s for s in assess(run).statements
        )


@pytest.mark.parametrize("name", ["stopped", "too full", "killed"])
def test_what_a_lost_agent_had_written_stays(hit, name):
    _, folder = hit
    run = Run.open(folder / name)
    assert run.status == "incomplete"
    assert run.info["agent"].get("ended") == ("killed by SIGKILL" if name == "killed" else None)
    steps = run.columns(Table.STEPS, "step")["step"].tolist()
    assert steps == list(range(len(steps)))
    assert (6 if name == "killed" else HIT) <= len(steps) < STEPS


# Restarts by the launcher -----------------------------------------------------------------------

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
