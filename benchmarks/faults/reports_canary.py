"""Code that differs on one rank (C1 to C10), and simulated faults of a device (C11 to C15).

A device's fault sits in a hook of every rank's, which a canary does not take for a part of the
model; a rank's own hook is named beside the device.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .job import Job, injects
from .model import IGNORED, PAD, WIDTH, Batch, BenchCausalLM


class OnOneRank(Job):
    """A model that is made otherwise on the worker that is hit."""

    from_the_start = True
    dropout = 0.1

    def build_model(self) -> nn.Module:
        model = super().build_model()
        if self.hit:
            self.change(model)
        return model

    def change(self, model: Any) -> None:
        """Change the model of this rank."""


@injects("C1")
class DropoutOff(OnOneRank):
    def change(self, model: Any) -> None:
        for block in model.blocks:
            block.dropout.p = 0.0


@injects("C2")
class SubmoduleEvaluates(OnOneRank):
    def change(self, model: Any) -> None:
        model.blocks[1].eval()


class Masking(BenchCausalLM):
    """Leaves out the label of the last token; on some ranks that of the one before too."""

    last = 1

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> dict[str, Any]:
        labels = labels.clone()
        labels[:, -self.last :] = IGNORED
        return super().forward(input_ids, labels, attention_mask)


@injects("C3")
class AnotherMask(OnOneRank):
    def build_model(self) -> nn.Module:
        model = Masking(self.dropout)
        if self.hit:
            model.last = 2
        return model


class Cast(nn.Module):
    """Runs what follows the embedding in another type on some ranks, as a stray cast does."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.float32

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.to(self.dtype).float()


@injects("C4")
class AnotherType(OnOneRank):
    between = Cast

    def change(self, model: Any) -> None:
        model.between.dtype = torch.bfloat16


@injects("C5")
class CompiledOnOneRank(OnOneRank):
    dropout = 0.0

    def change(self, model: Any) -> None:
        model.compile(backend="eager")


@injects("C6")
class AnotherAttentionBackend(OnOneRank):
    def forward(self, batch: Batch) -> Tensor:
        backend: AbstractContextManager[None] = nullcontext()
        if self.hit:
            backend = sdpa_kernel(SDPBackend.MATH)
        with backend:
            return super().forward(batch)


@injects("C7")
class LibraryFlag(OnOneRank):
    dropout = 0.0

    def prepare(self) -> None:
        torch.backends.mkldnn.set_flags(not self.hit)  # type: ignore[no-untyped-call]
        super().prepare()

    def after_optimizer(self) -> None:
        if self.step == self.trial.num_steps - 1:
            torch.backends.mkldnn.set_flags(True)  # type: ignore[no-untyped-call]


class Smoothed(BenchCausalLM):
    """Smooths its labels."""

    def __init__(self, dropout: float, smoothing: float) -> None:
        super().__init__(dropout)
        self.loss = nn.CrossEntropyLoss(ignore_index=IGNORED, label_smoothing=smoothing)

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> dict[str, Any]:
        logits = super().forward(input_ids, labels, attention_mask)["logits"]
        return {"loss": self.loss(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


@injects("C8")
class LabelSmoothing(OnOneRank):
    def build_model(self) -> nn.Module:
        return Smoothed(self.dropout, 0.1 if self.hit else 0.0)


@injects("C9")
class PatchedActivation(OnOneRank):
    def change(self, model: Any) -> None:
        for block in model.blocks:
            block.mlp[1].forward = lambda hidden: F.gelu(hidden, approximate="tanh")


class Padded(BenchCausalLM):
    """Ignores the labels of the token that its tokenizer pads with."""

    pad = PAD

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> dict[str, Any]:
        masked = labels.masked_fill(input_ids == self.pad, IGNORED)
        return super().forward(input_ids, masked, attention_mask)


@injects("C10")
class AnotherPadToken(OnOneRank):
    def build_model(self) -> nn.Module:
        model = Padded(self.dropout)
        if self.hit:
            model.pad = 5
        return model


# Devices --------------------------------------------------------------------------------------


class FaultyDevice(Job):
    """Corrupts a layer's output in a hook that all ranks have, on the worker that is hit."""

    from_the_start = True
    calls = 0

    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        model.blocks[0].output.register_forward_hook(self.hook)
        made: nn.Module = model
        return made

    def hook(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Return a layer's output as the device computes it."""
        if not self.hit or not torch.is_grad_enabled():
            return output
        self.calls += 1
        return self.compute(output)

    def compute(self, output: Tensor) -> Tensor:
        """Return what the faulty device makes of an output."""
        return output

    def flip(self, output: Tensor) -> Tensor:
        """Return an output with one flipped bit of an exponent."""
        bits = output.detach().clone()
        flat = bits.view(-1).view(torch.int32)
        flat[7] ^= 1 << 25
        return output + (bits - output.detach())


@injects("C11")
class BitFlip(FaultyDevice):
    def compute(self, output: Tensor) -> Tensor:
        return self.flip(output)


@injects("C12")
class RareFlip(FaultyDevice):
    def compute(self, output: Tensor) -> Tensor:
        return self.flip(output) if self.calls % 3 == 0 else output


@injects("C13")
class SmallRelativeError(FaultyDevice):
    def compute(self, output: Tensor) -> Tensor:
        return output * (1 + 1e-3)


@injects("C14")
class StuckElement(FaultyDevice):
    def compute(self, output: Tensor) -> Tensor:
        stuck = torch.zeros(WIDTH)
        stuck[3] = 1.0
        return output * (1 - stuck) + 0.5 * stuck


@injects("C15")
class NoisyGradient(FaultyDevice):
    def compute(self, output: Tensor) -> Tensor:
        if output.requires_grad:
            output.register_hook(self.disturb)  # type: ignore[no-untyped-call]
        return output

    def disturb(self, gradient: Tensor) -> Tensor:
        """Return a gradient with noise of its own size in a hundredth."""
        noise = torch.empty_like(gradient).normal_(generator=self.noise)
        disturbed: Tensor = gradient + 0.01 * gradient.norm() / gradient.numel() ** 0.5 * noise
        return disturbed

    @property
    def noise(self) -> torch.Generator:
        """A generator that nobody else has."""
        made: torch.Generator = torch.Generator().manual_seed(self.calls)
        return made


@injects("HP13")
class OwnCode(OnOneRank):
    """All ranks have the same model of their own code, and evaluate in every third step."""

    def hook(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Return an output somewhat larger."""
        return 1.01 * output

    def build_model(self) -> nn.Module:
        model: Any = Smoothed(self.dropout, 0.1)
        for block in model.blocks:
            block.mlp[1].forward = lambda hidden: F.gelu(hidden, approximate="tanh")
        model.blocks[0].output.register_forward_hook(self.hook)
        if self.rank == 0:
            model.head.register_forward_hook(lambda *_: None)
        made: nn.Module = model
        return made

    def before_step(self) -> None:
        self.module.blocks[1].train(self.step % 3 > 0)
