"""Launches of the probe on an accelerator in one step, counted without one.

A model with more and more parameter tensors trains under DDP; its local gradient, the reduced one
and their handover are measured by the kernels for CUDA, which Triton's interpreter runs on the CPU.
Every launch of such a kernel, every operation of torch that would be one, and every copy between
host and device counts.

Run ``python benchmarks/launches.py``, or ``make bench``.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
STEPS = 4  # two in which the tap learns what happens to gradients, one that prepares, and one
FREE = ("view", "detach", "slice", "select", "empty", "new_empty", "alias", "lift_fresh", "reshape")
"""Operations that start nothing on a device, by how their names begin."""


def measure(tensors: tuple[int, ...] = TENSORS, **ddp: Any) -> list[Row]:
    """Return a row for each number of parameter tensors: ``tensors``, ``launches``, ``of``.

    Args:
        tensors: How many parameter tensors.
        ddp: Options of DistributedDataParallel.
    """
    return [_in_interpreter(number, ddp) for number in tensors]


def render(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| parameter tensors | launches and copies per step |", "|---|---|"]
    lines += [f"| {row['tensors']} | {row['launches']} |" for row in rows]
    return "\n".join(lines)


def _in_interpreter(tensors: int, ddp: dict[str, Any]) -> Row:
    """Count in a process of its own: Triton decides when it is imported whether it interprets."""
    command = [sys.executable, __file__, "--count", str(tensors), json.dumps(ddp)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    row: Row = json.loads(done.stdout)
    return row


class _Model(nn.Module):
    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ParameterList(torch.randn(5) for _ in range(tensors // LAYERS))
            for _ in range(LAYERS)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return a scalar."""
        return torch.stack([inputs @ each for each in self.parameters()]).sum()


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations of torch while it is on, and launches of kernels."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on = False
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation as it is."""
        name = func.name().removeprefix("aten::")
        if self.on and not name.startswith(FREE):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    def count(self, name: str) -> None:
        """Count one launch."""
        self.counts[name] += 1

    @contextmanager
    def within(self, *, on: bool = True) -> Iterator[None]:
        """Count, or do not."""
        before, self.on = self.on, on
        yield
        self.on = before

    def guarded(self, work: Callable[[], None]) -> None:
        """Run the monitor's work, and count in it."""
        with self.within():
            work()


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


def _count(tensors: int, ddp: dict[str, Any]) -> Row:
    counting = _Counting()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        try:
            _train(DistributedDataParallel(_Model(tensors), **ddp), counting)
        finally:
            dist.destroy_process_group()
    return {"tensors": tensors, "launches": counting.counts.total(), "of": dict(counting.counts)}


def _train(model: DistributedDataParallel, counting: _Counting) -> None:
    from rankscope.capture import DDPTap, ReadReduced, Sketcher
    from rankscope.capture.folding import Folding
    from rankscope.capture.handover import launch
    from rankscope.capture.kernels import (
        fused,
        period_signs,
        triton,
        triton_combine,
        triton_handover,
    )
    from rankscope.core.groups import group_parameters
    from rankscope.core.sections import cut_sections

    kernels = (triton, "measure_tiles"), (triton_combine, "combine"), (triton_handover, "gather")
    for module, name in kernels:
        setattr(module, name, _Counted(getattr(module, name), counting))
    parameters = dict(model.module.named_parameters())
    groups = group_parameters(parameters)
    sizes = {name: parameter.numel() for name, parameter in parameters.items()}
    sections = cut_sections(sizes, groups, max_sections=8)
    cpu = torch.device("cpu")
    sketcher = Sketcher(cpu, groups, WIDTH, sections=sections)
    tap = DDPTap(
        model, dict(parameters), sketcher, counting.guarded, reduced=ReadReduced.SKETCH,
        witness=_Nobody(), shadowed=lambda: None,
    )  # fmt: skip
    folding = Folding(sections.counts, WIDTH, WIDTH, 13, 7, reduced=True)
    with counting:
        for step in range(STEPS):
            if step == STEPS - 2:  # the interpreter is slow
                sketcher._kernel = fused.TritonKernel(cpu, WIDTH, period_signs(0), num_processors=1)
                sketcher._together.clear()
            counting.counts.clear()
            tap.begin_forward(measure=True)
            model(torch.randn(5)).backward()
            with counting.within():
                measured = tap.collect()
                assert measured is not None
                if step >= STEPS - 2:
                    launch(measured, folding)
                    counting.count("copy to the host")
            model.zero_grad()
    tap.remove()


class _Nobody:
    wanted_names: tuple[str, ...] = ()

    def see_local(self, name: str, gradient: Tensor) -> None:
        """Look away."""

    def see_locals(self, gradients: Iterable[tuple[str, Tensor]]) -> None:
        """Look away."""

    def see_reduced(self) -> None:
        """Look away."""


def main() -> None:
    """Count and print."""
    if sys.argv[1:2] == ["--count"]:
        torch.set_num_threads(1)
        print(json.dumps(_count(int(sys.argv[2]), json.loads(sys.argv[3]))))
        return
    rows = measure()
    Console().print(render(rows), markup=False)
    Console().print(rows[-1]["of"])


if __name__ == "__main__":
    main()
