"""What the parts of ``make gpu`` share: where they run, what they yield, and real ranks.

In a dry run everything is tiny and happens on the CPU, Triton in its interpreter.
"""

import os
import tempfile
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from gpu_processes import context_of_ranks, end_with_parent
from harness import median_interval

from rankscope.gradients.kernels.interface import period_signs
from rankscope.gradients.kernels.plain import PlainKernel
from rankscope.gradients.sketch import Sketcher

CPU = torch.device("cpu")
T = TypeVar("T")
Value = Any
"""A number, a word, or a :class:`Spread`."""
Values = dict[str, Value]

_RANK_SECONDS = 120  # that a collective may take: one rank alone must not hold up the whole part


class NotPossibleError(Exception):
    """Something cannot be measured here; the message says why in one line."""


def attempt(rows: Iterable[str], work: Callable[[], Values]) -> Values:
    """Return what some work yields; if it fails, why, for each of its rows."""
    try:
        return work()
    except NotPossibleError as reason:
        text = f"not possible here: {reason}"
    except Exception as error:
        traceback.print_exc()
        text = f"{FAILED}: {type(error).__name__}: {_last_line(str(error))}"
    return dict.fromkeys(rows, text)


FAILED = "failed"
"""How the value of a row begins that should have been measured."""


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing is said"])[-1][:200]


@dataclass(frozen=True, slots=True)
class Spread:
    """A median, and its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        """Return that of several values."""
        return cls(*median_interval(values))


def as_fields(value: Value) -> dict[str, Any]:
    """Return a value as the fields of a row."""
    return asdict(value) if isinstance(value, Spread) else {"value": value}


@dataclass(frozen=True, slots=True)
class Setup:
    """Where and how large.

    Attributes:
        dry: Whether all is tiny, and on the CPU.
        seconds: How long one thing is timed.
    """

    dry: bool
    seconds: float

    @property
    def device(self) -> torch.device:
        """The present device."""
        return CPU if self.dry else torch.device("cuda", torch.cuda.current_device())

    @property
    def num_devices(self) -> int:
        """How many there are; a dry run plays that there is one."""
        return 1 if self.dry else torch.cuda.device_count()

    def pick(self, real: T, dry: T) -> T:
        """Return one of two sizes."""
        return dry if self.dry else real

    def synchronise(self) -> None:
        """Wait for the device."""
        if not self.dry:
            torch.cuda.synchronize()


def kernel_for(setup: Setup, width: int) -> Any:
    """Return the Triton kernel itself, which raises where it fails."""
    from rankscope.gradients.kernels.fused import TritonKernel

    processors = {"num_processors": 2} if setup.dry else {}
    return TritonKernel(setup.device, width, period_signs(0), **processors)


def plain_for(setup: Setup, width: int) -> PlainKernel:
    """Return the kernel in plain torch."""
    return PlainKernel(setup.device, width, period_signs(0))


def use_kernel(sketcher: Sketcher, kernel: Any) -> Sketcher:
    """Have a sketcher that has not measured anything yet use a kernel."""
    inner: Any = sketcher
    inner._kernel = kernel
    if hasattr(inner, "_native"):
        inner._native = None
    return sketcher


# Real ranks -------------------------------------------------------------------------------------


def run_ranks(work: Callable[..., Any], ranks: int, backend: str, setup: Setup, *args: Any) -> Any:
    """Run ``work(setup, *args)`` on real ranks that share the devices; return rank 0's result.

    Raises:
        NotPossibleError: A rank raised it, or found no memory.
        RuntimeError: A rank failed; the message is its traceback.
    """
    context = context_of_ranks(dry=setup.dry)
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            receiving, sending = context.Pipe(duplex=False)
            given = (work, rank, ranks, backend, f"{folder}/store", sending, setup, args)
            process = context.Process(target=_run_rank, args=given)
            process.start()
            sending.close()
            pipes.append(receiving)
            processes.append(process)
        try:
            return _results(pipes)[0]
        finally:
            for process in processes:
                process.join(timeout=20)
                if process.is_alive():
                    process.kill()
                    process.join()


def _results(pipes: list[Connection]) -> dict[int, Any]:
    """Return what ranks send, by rank; the first that fails ends it."""
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        left = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        for pipe in wait(left):
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                kind, results[rank] = pipes[rank].recv()
            except EOFError:
                kind, results[rank] = RuntimeError, f"rank {rank} died"
            if kind is not None:
                raise kind(results[rank])
    return results


def _run_rank(
    work: Callable[..., Any],
    rank: int,
    ranks: int,
    backend: str,
    store: str,
    pipe: Connection,
    setup: Setup,
    args: tuple[Any, ...],
) -> None:
    end_with_parent()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    try:
        torch.set_num_threads(1)
        if not setup.dry:
            torch.cuda.set_device(rank % setup.num_devices)
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=_RANK_SECONDS),
        )
        torch.manual_seed(rank)
        pipe.send((None, work(setup, *args)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        if isinstance(error, NotPossibleError | torch.OutOfMemoryError):
            pipe.send((NotPossibleError, _last_line(str(error))))
        else:
            pipe.send((RuntimeError, traceback.format_exc()))
        os._exit(1)  # others may wait for it


def agreed(number: float) -> float:
    """Return rank 0's number on all ranks."""
    numbers = [number]
    dist.broadcast_object_list(numbers)
    return numbers[0]


def scratch() -> tempfile.TemporaryDirectory[str]:
    """Return a directory for runs, removed at the end."""
    return tempfile.TemporaryDirectory(prefix="rankscope-gpu-")


def recorded(run_dir: Path, *names: str) -> list[Any]:
    """Return columns of the steps table."""
    from rankscope import Run
    from rankscope.bus.evidence import Table

    columns = Run.open(run_dir).columns(Table.STEPS, *names)
    return [columns[name] for name in names]
