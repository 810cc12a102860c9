"""What the probe takes of the training's thread in a step, part by part.

One process trains a small Llama under DDP (gloo), and measures its gradients as ``watch`` does;
what a step yields is dropped. Time is that of the training's thread while it runs the monitor's
work, not the clock on the wall: other processes on the machine do not count.

``python benchmarks/probe_cost.py`` prints one JSON row per model. ``beside_ms`` is what is not the
reading of gradients; ``parts_us`` comes from a second run, in which timing costs something too.
"""

import argparse
import cProfile
import functools
import inspect
import json
import pstats
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankscope.evidence.environment import probe as optimizer
from rankscope.evidence.loss import probe as loss
from rankscope.evidence.randomness import probe as rng
from rankscope.evidence.samples import probe as samples
from rankscope.evidence.state import meter
from rankscope.gradients import sketch
from rankscope.session import collector, outbox
from rankscope.session.collector import StepCollector
from rankscope.session.instruments import choose_instruments, job_of
from rankscope.session.options import WatchOptions
from rankscope.session.outbox import LocalStep
from rankscope.wrappers import ddp, passes, transfer
from rankscope.wrappers.calls import ModuleHook
from rankscope.wrappers.find import find_wrapper
from rankscope.wrappers.guard import Guard

STEPS = 150
WARM_UP = 40  # by then, the first looks at all state are over
MODELS = {"2 layers": (64, 2), "24 layers": (64, 24)}
GRADIENTS = (ddp, sketch, transfer)
"""Modules that read gradients, and hand over what they have read."""

BESIDE = (collector, loss, optimizer, outbox, passes, rng, samples, meter)


class TimedGuard(Guard):
    """A guard that counts the thread's own time."""

    nanoseconds = 0

    def __call__(self, work: Callable[..., None], *args: Any) -> None:
        """Run ``work`` on what follows it."""
        outer, start = not self._depth, time.thread_time_ns()
        super().__call__(work, *args)
        if outer:
            self.nanoseconds += time.thread_time_ns() - start


class Parts:
    """Times the public methods of classes, each without those that it calls."""

    def __init__(self) -> None:
        self.nanoseconds: dict[str, int] = defaultdict(int)
        self.calls: dict[str, int] = defaultdict(int)
        self._stack: list[int] = []

    def watch(self, module: ModuleType) -> None:
        """Time all classes that a module defines."""
        name = module.__name__.rpartition(".")[2]
        for kind in vars(module).values():
            if not inspect.isclass(kind) or kind.__module__ != module.__name__:
                continue
            for key, function in list(vars(kind).items()):
                public = not key.startswith("_") or key == "__init__" or key.startswith("_on")
                if inspect.isfunction(function) and public:
                    setattr(kind, key, self._timed(function, f"{name}.{kind.__name__}.{key}"))

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._stack.append(0)
            start = time.thread_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.thread_time_ns() - start
                self.nanoseconds[name] += spent - self._stack.pop()
                self.calls[name] += 1
                if self._stack:
                    self._stack[-1] += spent

        return timed


def llama(hidden: int, layers: int) -> nn.Module:
    """Return a small Llama with tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096,
            hidden_size=hidden,
            intermediate_size=int(hidden * 2.7) // 8 * 8,
            num_hidden_layers=layers,
            num_attention_heads=max(hidden // 64, 1),
            num_key_value_heads=max(hidden // 64, 1),
            tie_word_embeddings=True,
        )
    )
    return model


class Watched:
    """A model under DDP with its optimizer and the monitor's collector, whose steps go nowhere."""

    def __init__(self, hidden: int, layers: int, *, evidence: bool, reduced: str) -> None:
        self.model = DistributedDataParallel(llama(hidden, layers))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        options = WatchOptions(reduced=reduced, evidence=evidence)
        wrapped = find_wrapper(self.model)
        instruments = choose_instruments(wrapped, options)
        job = job_of(wrapped, self.optimizer, options)
        self.guard = TimedGuard(_fail)
        self.collector = StepCollector(instruments, job, self.guard, _pack)
        self._hook()

    def _hook(self) -> None:
        collector, guard = self.collector, self.guard

        def before(model: Any, args: Any, kwargs: Any) -> None:
            guard(collector.begin_forward, model, args, kwargs)

        def after(model: Any, args: Any, kwargs: Any, output: Any) -> None:
            guard(collector.end_forward, model, args, kwargs, output)

        self.hook = ModuleHook(self.model, before, after)
        self.optimizer.register_step_pre_hook(
            lambda *_: guard(collector.begin_optimizer_step, self.optimizer)
        )
        self.optimizer.register_step_post_hook(
            lambda *_: guard(collector.count_optimizer_step, self.optimizer)
        )

    def step(self, ids: Tensor) -> None:
        """Train on one batch."""
        self.optimizer.zero_grad()
        self.model(input_ids=ids, labels=ids).loss.backward()
        self.optimizer.step()


def measured(watched: Watched, steps: int) -> Iterator[float]:
    """Yield milliseconds of thread time in the monitor of each step, after some to warm up."""
    generator = torch.Generator().manual_seed(1)
    for step in range(steps + WARM_UP):
        before = watched.guard.nanoseconds
        watched.step(torch.randint(4096, (2, 64), generator=generator))
        if step >= WARM_UP:
            yield (watched.guard.nanoseconds - before) / 1e6


def cost(
    name: str,
    *,
    steps: int = STEPS,
    evidence: bool = True,
    reduced: str = "sketch",
    parts: bool = True,
    profile: bool = False,
) -> dict[str, Any]:
    """Return a row of the table: what a model's step costs."""
    chosen: dict[str, Any] = {"evidence": evidence, "reduced": reduced}
    watched = Watched(*MODELS[name], **chosen)
    each = sorted(measured(watched, steps))
    row = {
        "model": name,
        "tensors": sum(1 for _ in watched.model.parameters()),
        "probe_ms": round(each[len(each) // 2], 3),
        "probe_ms_p10": round(each[len(each) // 10], 3),
    }
    if parts:
        row |= parts_of(MODELS[name], chosen, steps)
    if profile:
        _profile(Watched(*MODELS[name], **chosen), steps)
    return row


def run_all(models: Sequence[str], **chosen: Any) -> list[dict[str, Any]]:
    """Return a row for each model, measured in this process; see :func:`cost`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=cast("Any", dist).HashStore(), rank=0, world_size=1)
    try:
        return [cost(name, **chosen) for name in models]
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)


def render(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| model | tensors | median step | tenth percentile |", "|---|---|---|---|"]
    lines += [
        f"| {row['model']} | {row['tensors']} | {row['probe_ms']:.2f} ms "
        f"| {row['probe_ms_p10']:.2f} ms |"
        for row in rows
    ]
    return "\n".join(lines)


def parts_of(model: tuple[int, int], chosen: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return what the parts take, from methods that are timed from now on."""
    parts = Parts()
    for module in (*GRADIENTS, *BESIDE):
        parts.watch(module)
    watched = Watched(*model, **chosen)
    for number, _ in enumerate(measured(watched, steps + 1)):
        if number == 0:
            parts.nanoseconds.clear()
            parts.calls.clear()
    readers = tuple(module.__name__.rpartition(".")[2] for module in GRADIENTS)
    micro = {name: ns / 1e3 / steps for name, ns in parts.nanoseconds.items()}
    beside = {name: us for name, us in micro.items() if name.split(".")[0] not in readers}
    largest = sorted(micro.items(), key=lambda item: -item[1])
    return {
        "beside_ms": round(sum(beside.values()) / 1e3, 3),
        "gradients_ms": round((sum(micro.values()) - sum(beside.values())) / 1e3, 3),
        "parts_us": {name: round(us, 1) for name, us in largest if us >= 1},
    }


def _profile(watched: Watched, steps: int) -> None:
    """Print what cProfile says of the monitor's work."""
    profile = cProfile.Profile(time.thread_time)
    plain = Guard.__call__

    def profiled(guard: Guard, work: Callable[..., None], *args: Any) -> None:
        if guard._depth:
            plain(guard, work, *args)
            return
        profile.enable()
        plain(guard, work, *args)
        profile.disable()

    Guard.__call__ = profiled  # type: ignore[assignment]
    list(measured(watched, steps))
    Guard.__call__ = plain  # type: ignore[method-assign]
    pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(45)


def _pack(local: LocalStep) -> None:
    """Do all that is done with a step but to send it; on the host, nothing has to be awaited."""
    local.pack(local.read())


def _fail(error: Exception) -> None:
    raise SystemExit(f"the monitor has failed: {error!r}") from error


def main() -> None:
    """Measure all models, or the one that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--reduced", default="sketch")
    parser.add_argument("--no-evidence", action="store_true")
    parser.add_argument("--profile", action="store_true", help="cProfile's table, on stderr")
    parser.add_argument("--no-parts", dest="parts", action="store_false")
    arguments = parser.parse_args()
    chosen: dict[str, Any] = {
        "steps": arguments.steps,
        "reduced": arguments.reduced,
        "parts": arguments.parts,
    }
    chosen |= {"evidence": not arguments.no_evidence, "profile": arguments.profile}
    for row in run_all(arguments.model or list(MODELS), **chosen):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
