"""A process that stands for some hosts, with either engine; ``benchmarks/hosts.py`` starts it."""

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STEP_BYTES = 30_000
DROP_SECONDS = float(os.environ.get("BENCH_DROP", "3"))


def serve_gloo(place: Path, first: int, last: int, world: int, steps: int, pause: float) -> None:
    """Be the ranks from ``first`` to ``last``; rank 0 tells what it sees."""
    from datetime import timedelta

    import torch
    import torch.distributed as distributed

    dist: Any = distributed  # much of it is not declared

    address = os.environ.get("BENCH_ADDRESS", "127.0.0.1")
    master = os.environ.get("BENCH_MASTER", "127.0.0.1")
    timeout = timedelta(seconds=float(os.environ.get("BENCH_TIMEOUT", "60")))
    torch.set_num_threads(1)

    def serve(rank: int) -> None:
        began = time.perf_counter()
        store = dist.TCPStore(master, 29511, world, rank == 0, timeout=timeout)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timeout
        group = dist.ProcessGroupGloo(store, rank, world, options)
        own = torch.zeros(STEP_BYTES, dtype=torch.uint8)
        outputs = [[torch.zeros_like(own) for _ in range(world)]] if rank == 0 else []
        gather = dist.GatherOptions()
        gather.rootRank = 0
        group.gather(outputs, [own], gather).wait()
        if rank == 0:
            tell(connected=time.perf_counter() - began)
        for step in range(steps):
            start, used = time.perf_counter(), time.process_time()
            try:
                group.gather(outputs, [own], gather).wait()
            except RuntimeError as error:
                tell(rank=rank, step=step, at=time.time(), error=str(error).splitlines()[0][:90])
                os._exit(1)
            if rank == 0:
                wall, cpu = time.perf_counter() - start, time.process_time() - used
                tell(step=step, at=time.time(), wall=wall, cpu=cpu)
            time.sleep(pause)

    _in_threads(serve, range(first, last))


def serve_zmq(place: Path, first: int, last: int, world: int, steps: int, pause: float) -> None:
    """Be the hosts from ``first`` to ``last``; host 0 is the root and tells what it sees."""
    from rankscope.agent.hosts import HostLink, RootLink

    if first == 0:
        root = RootLink(os.environ.get("BENCH_ADDRESS", "127.0.0.1"))
        (place / "writing").write_bytes(root.invitation.encode())
        (place / "writing").rename(place / "invitation")
        _collect(root, world, steps)
        return
    while not (place / "invitation").exists():
        time.sleep(0.005)
    links = [HostLink(host) for host in range(first, last)]
    for link in links:
        link.open((place / "invitation").read_bytes())
    payload = bytes(STEP_BYTES)
    answered = [-2] * len(links)
    sent = -2
    while min(answered) < steps - 1:
        if sent < steps - 1 and (pause or min(answered) == sent):
            sent += 1
            for link in links:
                link.send(sent.to_bytes(8, "little", signed=True) + payload)
        time.sleep(max(pause, 0.001))
        for place_of, link in enumerate(links):
            for answer in link.poll():
                answered[place_of] = int.from_bytes(answer, "little", signed=True)
    for link in links:
        link.close(1.0)


def _collect(root: Any, world: int, steps: int) -> None:
    began = time.perf_counter()
    arrived: dict[int, int] = {}
    start, used, gone = began, time.process_time(), set[int]()
    for step in range(-1, steps):
        while True:
            for host, payload in root.poll():
                arrived[host] = int.from_bytes(payload[:8], "little", signed=True)
            gone |= {h for h in arrived if root.silent_seconds(h) > DROP_SECONDS}
            there = min((s for h, s in arrived.items() if h not in gone), default=-2)
            if len(arrived) == world - 1 and there >= step:
                break
            time.sleep(0.001)
        wall, cpu = time.perf_counter() - start, time.process_time() - used
        tell(**({"connected": wall} if step < 0 else {"wall": wall, "cpu": cpu}),
             step=step, at=time.time(), gone=sorted(gone))  # fmt: skip
        start, used = time.perf_counter(), time.process_time()
        for host in root.hosts:
            root.send(host, step.to_bytes(8, "little", signed=True))
    root.close(2.0)


def _in_threads(work: Any, items: Sequence[int]) -> None:
    threads = [threading.Thread(target=work, args=(item,)) for item in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def tell(**what: Any) -> None:
    """Print a line that the measuring process reads."""
    print(json.dumps({**what, "rss": resident_mb()}), flush=True)


def resident_mb() -> float:
    """Return what this process holds in memory, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 1e6


def main() -> None:
    """Serve as the command line says: engine, folder, first host, last, world, steps, pause."""
    engine, place, *numbers, pause = sys.argv[1:]
    first, last, world, steps = map(int, numbers)
    serve = {"gloo": serve_gloo, "zmq": serve_zmq}[engine]
    serve(Path(place), first, last, world, steps, float(pause))


if __name__ == "__main__":
    main()
