"""Launches of the probe on an accelerator in one step, counted without one.

A model with more and more parameter tensors trains under DDP, watched with default settings:
gradients and evidence of every step. What the kernels for CUDA do, Triton's interpreter does on the
CPU. Every launch of such a kernel, every operation of torch that would be one, and every copy
between host and device counts.

A caching allocator gives a training the same memory in every step. Here a hook of the training puts
gradients where they were, or elsewhere, to count both.

Run ``python benchmarks/launches.py``, or ``make bench``.
"""

import functools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

Row = dict[str, Any]
TENSORS = (10, 100, 1000)
LAYERS = 5
WIDTH = 61
LEARNT = 2  # steps in which the tap learns what happens to gradients
FREE = ("view", "detach", "slice", "select", "empty", "new_empty", "alias", "lift_fresh", "reshape",
        "as_strided", "set_", "_local_scalar_dense", "_unsafe_view", "unsqueeze", "t")  # fmt: skip
"""Operations that start nothing on a device, by their names or how these begin."""

GRADIENTS, EVIDENCE, BATCH, SHARED = "gradients", "evidence", "batch", "copy to the host"
PER_STEP = (GRADIENTS, EVIDENCE, SHARED)
"""What a step takes, whatever it is made of: micro-batches add what is of the batch."""


def measure(tensors: tuple[int, ...] = TENSORS, **ddp: Any) -> list[Row]:
    """Return a row for each number of parameter tensors.

    Args:
        tensors: How many parameter tensors.
        ddp: Options of DistributedDataParallel.

    Returns:
        Rows with ``tensors``; ``launches`` of a step whose gradients lie where they lay in the step
        before, and ``moved`` of one whose gradients do not; ``batch`` of a micro-batch's loss,
        labels and samples; and what they are, ``of``.
    """
    # In a process of its own: Triton decides when it is imported whether it interprets.
    command = [sys.executable, __file__, "--count", json.dumps(tensors), json.dumps(ddp)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    rows: list[Row] = json.loads(done.stdout)
    return rows


def render(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| parameter tensors | launches and copies per step | where gradients have moved "
        "| per micro-batch besides: loss, labels and samples |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row['tensors']} | {row['launches']} | {row['moved']} | {row['batch']} |"
        for row in rows
    ]
    return "\n".join(lines)


class _Model(nn.Module):
    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ParameterList(torch.randn(5) for _ in range(tensors // LAYERS))
            for _ in range(LAYERS)
        )

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """Return a loss."""
        inputs = (input_ids * attention_mask + labels).float().mean(0)
        return {"loss": torch.stack([inputs @ each for each in self.parameters()]).sum()}


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations of torch while it is on, and launches of kernels."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on = False
        self.area = GRADIENTS
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation as it is."""
        name = func.name().removeprefix("aten::")
        if self.on and not (name.startswith(FREE[:-1]) or name == FREE[-1]):
            self.counts[self.area][name] += 1
        return func(*args, **(kwargs or {}))

    def count(self, name: str) -> None:
        """Count one launch."""
        if self.on:
            self.counts[self.area][name] += 1

    @contextmanager
    def within(self, *, on: bool = True, area: str | None = None) -> Iterator[None]:
        """Count, or do not."""
        before = self.on, self.area
        self.on, self.area = on, area or self.area
        try:
            yield
        finally:
            self.on, self.area = before

    def take(self) -> dict[str, dict[str, int]]:
        """Return what was counted, and count anew."""
        counts, self.counts = self.counts, defaultdict(Counter)
        return {area: dict(counter) for area, counter in counts.items()}


class _Counted:
    """A kernel whose launches are counted."""

    def __init__(self, kernel: Any, counting: _Counting) -> None:
        self._kernel, self._counting = kernel, counting

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self._counting.count(f"kernel {self._kernel.fn.__name__}")
            with self._counting.within(on=False):  # the interpreter's own operations
                self._kernel[grid](*args, **options)

        return launch


class _Training:
    """A model that trains, and the monitor's collector, whose steps go nowhere."""

    def __init__(self, tensors: int, ddp: dict[str, Any], counting: _Counting) -> None:
        from rankscope.session.collector import StepCollector
        from rankscope.session.instruments import choose_instruments, job_of
        from rankscope.session.options import WatchOptions
        from rankscope.wrappers.find import find_wrapper
        from rankscope.wrappers.guard import Guard

        def fail(error: Exception) -> None:
            raise SystemExit(f"the monitor has failed: {error!r}") from error

        self.counting, self._memory = counting, 0
        self.model = DistributedDataParallel(_Model(tensors), **ddp)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        options = WatchOptions(sketch_width=WIDTH, overhead_budget=None)
        wrapped = find_wrapper(self.model)
        instruments = choose_instruments(wrapped, options)
        job = job_of(wrapped, self._optimizer, options)
        self._guard = Guard(fail)
        self.collector = StepCollector(instruments, job, self._guard, lambda step: None)
        for parameter in self.model.parameters():
            self._place(parameter)

    def step(self, *, moves: bool = False) -> dict[str, dict[str, int]]:
        """Train for a step; return what of it was counted.

        Args:
            moves: Whether gradients lie elsewhere than in the step before.
        """
        collector, optimizer = self.collector, self._optimizer
        self._memory ^= moves
        ids = torch.randint(9, (2, 5))
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        self._watched(partial(collector.begin_forward, self.model, (), given))
        self.counting.take()  # what belongs to the step before
        output = self.model(**given)
        self._watched(partial(collector.end_forward, self.model, (), given, output))
        output["loss"].backward()
        self._watched(partial(collector.begin_optimizer_step, optimizer))
        optimizer.step()
        self._watched(partial(collector.count_optimizer_step, optimizer))
        optimizer.zero_grad()
        self._watched(collector.close_step)
        return self.counting.take()

    def repeat_turn(self) -> None:
        """Let the next step compare what the last one has compared."""
        state: Any = self.collector._probes["state"]
        length = state._plan.length
        self.collector.step = -(-self.collector.step // length) * length

    def _watched(self, work: Callable[[], None]) -> None:
        self._guard(work)

    def _place(self, parameter: Tensor) -> None:
        """Put a parameter's gradient into one of two pieces of memory."""
        pieces = [torch.empty_like(parameter).untyped_storage() for _ in range(2)]

        def place(gradient: Tensor) -> Tensor:
            with self.counting.within(on=False):
                placed: Tensor = torch.empty(0)
                placed.set_(pieces[self._memory], 0, gradient.shape)  # type: ignore[call-overload]
                placed.copy_(gradient)
                return placed

        parameter.register_hook(place)  # type: ignore[no-untyped-call]


def _count_each(tensors: list[int], ddp: dict[str, Any]) -> list[Row]:
    """Count in a fork for each model, after the imports that all need."""
    import rankscope.gradients.kernels.fused
    import rankscope.gradients.kernels.many
    import rankscope.session.start  # noqa: F401

    torch.set_num_threads(1)
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        return pool.map(partial(_count, ddp=ddp), tensors, chunksize=1)


def _count(tensors: int, ddp: dict[str, Any]) -> Row:
    counting = _Counting()
    _attribute(counting)
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        try:
            with counting:
                training = _Training(tensors, ddp, counting)
                for _ in range(LEARNT):
                    training.step()
                _pretend(training)
                counted = []
                for moves in (False, False, True):
                    training.repeat_turn()
                    counted.append(training.step(moves=moves))
        finally:
            dist.destroy_process_group()
    _, still, moved = counted
    launches, when_moved = (_total(each, PER_STEP) for each in (still, moved))
    batch = _total(still, (BATCH,))
    return {
        "tensors": tensors,
        "launches": launches,
        "moved": when_moved,
        "batch": batch,
        "of": still,
    }


def _total(counts: dict[str, dict[str, int]], areas: tuple[str, ...]) -> int:
    return sum(sum(counts.get(area, {}).values()) for area in areas)


def _attribute(counting: _Counting) -> None:
    """From now on, count all that the monitor does, and what it is for."""
    from rankscope.evidence.loss import probe as loss
    from rankscope.evidence.loss.probe import LossMeter
    from rankscope.evidence.samples.probe import SampleMeter
    from rankscope.evidence.state.meter import StateMeter
    from rankscope.gradients import host
    from rankscope.wrappers.guard import Guard

    def wrap(kind: Any, names: tuple[str, ...], area: str | None) -> None:
        for name in names:
            setattr(kind, name, _within(counting, getattr(kind, name), area))

    wrap(Guard, ("__call__",), None)
    wrap(SampleMeter, ("see", "collect"), BATCH)
    wrap(LossMeter, ("see", "collect"), BATCH)
    wrap(loss._Multiplier, ("_see",), BATCH)
    wrap(StateMeter, ("see_local", "see_locals", "see_reduced", "before_update", "see_state"),
         EVIDENCE)  # fmt: skip
    wrap(host._Shared, ("begin",), SHARED)
    begin = host.HostCopy.__init__

    @functools.wraps(begin)
    def copy(self: Any, *args: Any, **kwargs: Any) -> None:
        counting.count("copy to the host")
        with counting.within(on=False):
            begin(self, *args, **kwargs)

    host.HostCopy.__init__ = copy  # type: ignore[method-assign]


def _within(counting: _Counting, function: Callable[..., Any], area: str | None) -> Any:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        with counting.within(area=area):
            return function(*args, **kwargs)

    return counted


def _pretend(training: _Training) -> None:
    """From now on, treat the CPU as an accelerator; the first steps would take long in this way."""
    from rankscope.evidence.loss import probe as loss
    from rankscope.evidence.state import readings
    from rankscope.gradients.kernels import fused, many, triton, triton_digest
    from rankscope.gradients.kernels.interface import period_signs
    from rankscope.wrappers import labels, samples
    from rankscope.wrappers import transfer as handover

    replaced: Any
    for replaced, name in (
        (triton, "measure_tiles"),
        (triton, "combine"),
        (triton_digest, "digest_chunks"),
        (triton, "gather"),
    ):
        setattr(replaced, name, _Counted(getattr(replaced, name), training.counting))
    cpu = torch.device("cpu")
    tap: Any = training.collector._tap
    tap._sketcher._kernel = fused.TritonKernel(cpu, WIDTH, period_signs(0), num_processors=1)
    tap._sketcher._readers.clear()
    state: Any = training.collector._probes["state"]
    state._slots.clear()  # what was learnt of them is of the host
    reader = many.DeviceReader(cpu)
    for replaced, name, value in (
        (readings, "native_sum", lambda: None),
        (readings, "device_reader", lambda device: reader),
        (handover, "_is_compiled", lambda: False),
        (handover, "_launches_on", lambda tensor: True),
        (loss, "_is_number_on_host", lambda value: False),
        (labels, "count_labels", lambda *args, **options: None),
        (samples, "_on_host", lambda tensor: False),
    ):
        setattr(replaced, name, value)


def main() -> None:
    """Count and print."""
    if sys.argv[1:2] == ["--count"]:
        print(json.dumps(_count_each(*map(json.loads, sys.argv[2:4]))))
        return
    rows = measure()
    Console().print(render(rows), markup=False)
    for area, counts in rows[-1]["of"].items():
        Console().print(area, counts)


if __name__ == "__main__":
    main()
