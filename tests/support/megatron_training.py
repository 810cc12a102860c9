"""Megatron-core's DistributedDataParallel in a plain loop, on the CPU, and what it should measure.

What it makes on a CUDA device is made on the host instead. Its distributed optimizer is not run:
torch's updates a worker's shards.
"""

import contextlib
import functools
import importlib.util
import warnings
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from support.loops import PLAN, bits_of, collect_warnings, grad_norm, watch
from support.models import make_batch, make_model
from support.recorded import Truth

MISSING = importlib.util.find_spec("megatron") is None
BUCKET_SIZE = 2000  # elements: two buckets


@dataclass(frozen=True)
class Mode:
    name: str
    accumulate: int = 1
    overlapped: bool = False
    sharded: bool = False  # by a reduce-scatter, as for the distributed optimizer
    no_sync: bool = False  # around all micro-batches but the last, as in Megatron's schedules
    summed: bool = False  # the loss is a sum over tokens, divided by their number afterwards
    schedule: bool = False  # Megatron's own schedule and optimizer do a step
    dtype: torch.dtype = torch.float32
    tier: str = "sketch"

    @property
    def factor(self):
        """What losses are multiplied by, in the median over workers; undone in what is recorded."""
        return 9.0 if self.summed else 1 / self.accumulate  # of 12, 9 and 6 label tokens


MODES = [
    Mode("plain"),
    Mode("overlapped", overlapped=True),
    Mode("sharded", accumulate=2, sharded=True),
    Mode("sharded, overlapped", accumulate=2, overlapped=True, sharded=True, no_sync=True),
    Mode("schedule, summed", overlapped=True, summed=True, schedule=True),
    Mode("scalars", accumulate=2, sharded=True, tier="scalars"),
    Mode("bf16", accumulate=2, no_sync=True, dtype=torch.bfloat16),
]


@functools.cache
def import_megatron():
    """Import Megatron-core so that it works on the CPU; without a compiler, which takes seconds."""
    torch.cuda.current_device = lambda: "cpu"

    def leave(function=None, **options):
        return leave if function is None else function

    with warnings.catch_warnings(), mock.patch.object(torch, "compile", leave):
        warnings.simplefilter("ignore")
        import megatron.core.distributed
        import megatron.core.optimizer.optimizer
        import megatron.core.parallel_state
        import megatron.core.pipeline_parallel.schedules
        import megatron.core.transformer
    return megatron.core


def make_ddp(module, mode):
    core = import_megatron()
    if not core.parallel_state.model_parallel_is_initialized():
        core.parallel_state.initialize_model_parallel()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = core.transformer.TransformerConfig(
            num_layers=1,
            hidden_size=24,
            num_attention_heads=1,
            calculate_per_token_loss=mode.summed,
        )
    settings = core.distributed.DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=mode.overlapped,
        use_distributed_optimizer=mode.sharded,
        bucket_size=BUCKET_SIZE,
    )
    return core.distributed.DistributedDataParallel(config, settings, module)


class MegatronLoop:
    """A small training on one rank, watched if ``run_dir`` is given."""

    def __init__(self, rank, mode, run_dir, **options):
        self.rank, self.mode = rank, mode
        self.warnings = collect_warnings()
        self.model = make_model().to(mode.dtype)
        self.ddp = make_ddp(self.model, mode)
        whole = [(p, p.main_grad) for p in self.model.parameters()]
        self.held = list(_shards(self.ddp)) if mode.sharded else whole
        self.optimizer = torch.optim.SGD([p for p, _ in self.held], lr=0.05, momentum=0.9)
        self.outer = self._prepare_for_the_schedule() if mode.schedule else None
        torch.manual_seed(100 + rank)
        self.scope = None
        if run_dir is not None:
            known = self.outer or self.optimizer
            self.scope = watch(self.ddp, known, run_dir=run_dir, **{"plan": PLAN, **options})

    def step(self, step, *, before_sync=lambda ddp: None):
        self.ddp.zero_grad_buffer()
        if self.outer is not None:
            self.outer.zero_grad()
            self._run_schedule(step)
            self.outer.step()
            return
        self._run(step, before_sync)
        for parameter, gradient in self.held:
            parameter.grad = gradient.to(parameter.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.mode.sharded:
            self.ddp.start_param_sync()

    def _run(self, step, before_sync):
        for micro in range(self.mode.accumulate):
            silent = self.mode.no_sync and micro < self.mode.accumulate - 1
            with self.ddp.no_sync() if silent else contextlib.nullcontext():
                self._loss(self.ddp, step, micro).backward()
        before_sync(self.ddp)
        self.ddp.finish_grad_sync()
        if self.mode.summed:
            self.ddp.scale_gradients(1 / self._tokens(step))

    def _prepare_for_the_schedule(self):
        core, config = import_megatron(), self.ddp.config
        config.finalize_model_grads_func = core.distributed.finalize_model_grads
        config.no_sync_func = self.ddp.no_sync if self.mode.no_sync else None
        model = self.model
        model.set_input_tensor = lambda tensors: None
        model.model_type = core.enums.ModelType.encoder_or_decoder
        optimizers = core.optimizer.optimizer
        settings = optimizers.OptimizerConfig(clip_grad=0.0)
        with on_the_host("tensor"):
            return optimizers.FP32Optimizer(self.optimizer, settings, lambda optimizer: None)

    def _run_schedule(self, step):
        with on_the_host("zeros"):
            import_megatron().pipeline_parallel.schedules.forward_backward_no_pipelining(
                forward_step_func=self._forward_step,
                data_iterator=iter(self._batch(step, m) for m in range(self.mode.accumulate)),
                model=[self.ddp],
                num_microbatches=self.mode.accumulate,
                seq_length=5,
                micro_batch_size=3,
            )

    def _forward_step(self, batches, model):
        batch = next(batches)
        num_tokens = (batch["labels"] != -100).sum()

        def loss_func(loss):
            total = loss * num_tokens
            if self.scope is not None:
                self.scope.loss(total, num_tokens, factor=num_tokens)
            return total, num_tokens.int(), {}

        return model(**batch)["loss"], loss_func

    def truth(self, step):
        """Return what is true of the next step, from a copy without Megatron, summed in float32."""
        state = torch.get_rng_state()
        alone = make_model().to(self.mode.dtype)
        torch.set_rng_state(state)
        alone.load_state_dict(self.model.state_dict())
        named = dict(alone.named_parameters())
        total = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in named.items()}
        norms, losses = [], []
        with torch.random.fork_rng(devices=[]):
            for micro in range(self.mode.accumulate):
                alone.zero_grad()
                loss = self._loss(alone, step, micro)
                loss.backward()
                tokens = int((self._batch(step, micro)["labels"] != -100).sum())
                losses.append(
                    loss.item() / (tokens if self.mode.summed else 1 / self.mode.accumulate)
                )
                norms.append(grad_norm(alone) / self.mode.factor)
                for name, parameter in named.items():
                    total[name] += parameter.grad.float()
        scale = self.mode.factor * self.mode.accumulate
        gradient = {name: g.double().flatten().numpy() / scale for name, g in total.items()}
        return Truth(gradient, norms, sum(losses) / len(losses))

    def bits(self):
        return bits_of(self.model, [self.optimizer])

    def left(self):
        """Return how many functions of the wrapper and its buckets are replaced."""
        groups = sum("start_grad_sync" in vars(group) for group in self.ddp.bucket_groups)
        return groups + ("finish_grad_sync" in vars(self.ddp))

    def _batch(self, step, micro):
        return make_batch(self.rank, self.mode.accumulate * step + micro)

    def _loss(self, model, step, micro):
        batch = self._batch(step, micro)
        loss = model(**batch)["loss"]
        if self.mode.summed:
            return loss * (batch["labels"] != -100).sum()
        return loss / self.mode.accumulate

    def _tokens(self, step):
        batches = [make_batch(rank, step) for rank in range(dist.get_world_size())]
        return float(sum((batch["labels"] != -100).sum() for batch in batches))


@contextlib.contextmanager
def on_the_host(name):
    """Let a function of torch's make its tensors on the host, wherever it is told to."""
    make = getattr(torch, name)

    def make_on_the_host(*args, device=None, **options):
        return make(*args, **options)

    with mock.patch.object(torch, name, make_on_the_host):
        yield


def _shards(ddp):
    """Yield this worker's shard of the parameters and of their gradient, of each bucket."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for group in ddp.bucket_groups:
        for bucket in group.buckets:
            values, gradients = bucket.param_data.chunk(size), bucket.grad_data.chunk(size)
            yield nn.Parameter(values[rank]), gradients[rank]
