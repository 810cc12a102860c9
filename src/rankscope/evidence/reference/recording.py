"""The passes of a step that is computed again, recorded while they run.

Of each forward pass, the inputs and the outputs are kept, and what is computed from the outputs
where ranks may exchange tensors in it; of each backward pass, what it is called on, and the
gradients that parameters get past the outputs.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankscope.evidence.canary.alone import watch_roots
from rankscope.evidence.canary.batch import CanaryDeclined
from rankscope.evidence.canary.replay import in_short
from rankscope.evidence.reference.direct import DirectGradients
from rankscope.evidence.reference.loss_tape import LossTape, may_record
from rankscope.evidence.reference.micro_batch import LOST, MicroBatch
from rankscope.gradients.names import canonical_name
from rankscope.wrappers.clipping import CLIP, VALUE
from rankscope.wrappers.fsdp2_model import every_parameter
from rankscope.wrappers.part_calls import PartCall
from rankscope.wrappers.passes import in_backward
from rankscope.wrappers.surroundings import outside

if TYPE_CHECKING:
    from rankscope.private import Patch

_INNER = "the loss takes values of the forward pass that the model does not return"
_BY_ITSELF = (
    "a backward pass of its own reaches parameters, as for a penalty on weights, and which "
    "micro-batch it belongs to is not known"
)
_UNSEEN = (
    "the training calls parts of the model, and no such call has given {} its gradient: it is left "
    "from an earlier step, or came in another way, as by checkpoints that are reentrant"
)
_PAST = "a forward pass of the step went past what was watched"


class StepRecording:
    """The micro-batches of one step.

    Attributes:
        step: Its number.
        declined: Why the step cannot be computed again; empty if it may be.
        seconds: Time that was spent on the training's thread.
    """

    def __init__(
        self,
        module: nn.Module,  # the model itself, not its data-parallel wrapper
        device: torch.device,
        step: int,
        *,
        inner: bool,  # see :class:`MicroBatch`
        with_loss: bool,  # record what is computed from the outputs
        declined: str = "",
    ) -> None:
        self.step = step
        self.declined = declined
        self.seconds = 0.0
        self._module = module
        self._device = device
        self._inner = inner
        self._with_loss = with_loss
        self._num_passes = 0
        self._by_parts = False  # the training calls parts of the model
        self._micro_batches: list[MicroBatch] = []
        self._num_clips = CLIP.num_calls
        self._num_value_clips = VALUE.num_calls
        self._entering = False  # a forward pass begins, and its inputs are not there yet
        self._inside: MicroBatch | None = None  # whose forward pass runs
        self._tape: LossTape | None = None  # that is being recorded
        self._root: Tensor | None = None  # of the present backward pass
        self._direct: DirectGradients | None = None  # of a backward pass that runs
        self._parts = False  # calls of parts were recorded since the last backward pass
        self._roots: Patch | None = None
        if not declined:
            self._roots = watch_roots(self._before_backward, self._after_backward)

    @property
    def trained(self) -> list[MicroBatch]:
        """The micro-batches of which a backward pass has reached the outputs."""
        return [micro for micro in self._micro_batches if micro.trained]

    @property
    def complete(self) -> bool:
        """Whether each forward pass of the step was recorded."""
        return not self.declined and len(self._micro_batches) == self._num_passes

    @property
    def num_spread(self) -> int:
        """The number of gradients of outputs that are spread over ranks."""
        return sum(micro.num_spread for micro in self._micro_batches)

    @property
    def clips(self) -> bool:
        """Whether torch has clipped gradients by their norm in the step."""
        return CLIP.num_calls > self._num_clips

    @property
    def clips_value(self) -> bool:
        """Whether torch has clipped elements of gradients in the step."""
        return VALUE.num_calls > self._num_value_clips

    def problem(self) -> str:
        """Return why the micro-batches cannot be run again; empty if they can."""
        if self.declined:
            return self.declined
        if not self.complete:
            return _PAST
        return "" if self.trained else "no backward pass has reached what the model has returned"

    @property
    def num_trained(self) -> int:
        """The number of micro-batches that were trained on, where parts make up one."""
        return sum(micro.joins is None for micro in self.trained)

    def begin_part(self, call: PartCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Save the inputs of a part of the model that the training calls."""
        if self.declined or not any(p.requires_grad for p in call.part.parameters()):
            return
        self._parts = True
        self._num_passes += 1
        self.attempt(self._keep, args, kwargs, call.name)

    def begin_pass(self) -> None:
        """Note the beginning of a forward pass; calls of parts have stood for it already."""
        parts, self._parts = self._parts, False
        if parts:
            return
        self.stop_tape()
        self._num_passes += 1
        self._entering = True

    def see_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Save the inputs of a forward pass that has begun."""
        if not self._entering:
            return
        self._entering = False
        if not self.declined:
            self.attempt(self._keep, args, kwargs)

    def _keep(self, args: Sequence[Any], kwargs: Mapping[str, Any], part: str = "") -> None:
        self._inside = MicroBatch(
            self._module, self._device, args, kwargs, inner=self._inner, part=part
        )
        self._by_parts |= bool(part)
        self._micro_batches.append(self._inside)

    def see_output(self, output: object) -> None:
        """Note the outputs of that forward pass, and record what is computed from them."""
        inside = self._inside
        self._inside = None
        if inside is not None:
            self.attempt(self._see_output, inside, output)

    def _see_output(self, micro: MicroBatch, output: object) -> None:
        self.stop_tape()  # of another micro-batch, as in a pipeline
        outputs = micro.see_output(output)
        if (
            outputs
            and self._with_loss
            and not self._by_parts
            and dist.get_world_size() > 1
            and may_record()
        ):
            micro.tape = self._tape = LossTape(outputs)
            self._tape.start()

    def _before_backward(self, tensors: Any, gradients: Any) -> None:
        """Keep the value on which a backward pass is called, and watch what passes the outputs."""
        tape = self.stop_tape()
        if tape is not None and len(tensors) == 1:
            tape.end(tensors[0], gradients[0])
        self._root = None
        self.attempt(outside, self._keep_root, tensors, gradients)
        if not (self.declined or in_backward()):  # a checkpoint's own begins inside
            self.attempt(outside, self._watch_direct, tensors)

    def _keep_root(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        if len(tensors) != 1 or tensors[0].numel() != 1:
            return
        tensor = tensors[0]
        gradient = gradients[0]
        root = tensor.detach() if gradient is None else tensor.detach() * gradient.detach()
        self._root = root.clone()

    def _watch_direct(self, tensors: Sequence[Tensor]) -> None:
        self._unwatch_direct()  # the last one was interrupted
        if self._micro_batches:
            outputs = {edge for micro in self._micro_batches for edge in micro.edges}
            inputs = {edge for micro in self._micro_batches for edge in micro.entries}
            self._direct = DirectGradients(tensors, outputs, _leaves(self._module), inputs)

    def _after_backward(self) -> None:
        """Give the root to the micro-batch that it trained, if it was one."""
        new = [micro for micro in self.trained if micro.root is None and micro.joins is None]
        if self._by_parts:
            for micro in new[1:]:
                micro.joins = new[0]
            self._parts = False
        for micro in new[:1] if self._by_parts else new:
            known = self._root is not None and (len(new) == 1 or self._by_parts)
            micro.root = self._root if known else math.nan
        if not (self.declined or in_backward()):
            self.attempt(outside, self._keep_direct, new)

    def _keep_direct(self, trained: Sequence[MicroBatch]) -> None:
        """Give the gradients past the outputs to the micro-batch that was ``trained``."""
        direct = self._unwatch_direct()
        if direct is None:
            return
        if direct.lost:
            raise CanaryDeclined(LOST.format(direct.lost))
        if direct.takes_inner:
            raise CanaryDeclined(_INNER)
        if direct.by_name:
            if not trained or (len(trained) > 1 and not self._by_parts):
                raise CanaryDeclined(_BY_ITSELF)
            trained[0].direct = direct.by_name

    def check_parts(self) -> None:
        """Check that calls of parts explain every parameter's gradient; CanaryDeclined if not."""
        if not self._by_parts:
            return
        reached = {key for micro in self.trained for key in micro.reached}
        direct = {name for micro in self.trained for name in micro.direct}
        for name, parameter in self._module.named_parameters():
            if id(parameter) in reached or canonical_name(name) in direct:
                continue
            if parameter.grad is not None and bool((parameter.grad != 0).any()):
                raise CanaryDeclined(_UNSEEN.format(name))

    def attempt(self, work: Callable[..., None], *args: Any) -> None:
        """Call a function; if it fails, the step is not computed again."""
        start = time.perf_counter()
        try:
            work(*args)
        except CanaryDeclined as reason:
            self._decline(in_words(reason))
        except Exception as error:
            self._decline(f"something failed ({in_short(error)})")
        self.seconds += time.perf_counter() - start

    def _decline(self, why: str) -> None:
        self.declined = why
        self._micro_batches.clear()

    def _unwatch_direct(self) -> DirectGradients | None:
        direct = self._direct
        self._direct = None
        if direct is not None:
            direct.remove()
        return direct

    def stop_tape(self) -> LossTape | None:
        """Record no more of the present loss; return what was recorded."""
        tape = self._tape
        self._tape = None
        if tape is not None:
            tape.stop()
        return tape

    def stop(self) -> None:
        """Leave autograd's engine and the graph alone."""
        self.stop_tape()
        self._unwatch_direct()
        if self._roots is not None:
            self._roots.remove()
            self._roots = None


def _leaves(module: nn.Module) -> dict[int, str]:
    """Return names of parameters by the ids of the tensors that a loss may take of them.

    Under FSDP2 these are whole ones where they are gathered, and shards elsewhere.
    """
    names = {id(p): canonical_name(name) for name, p in module.named_parameters()}
    whole = ((managed.name, managed.unsharded) for managed in every_parameter(module))
    return names | {id(parameter): name for name, parameter in whole if parameter is not None}


def in_words(reason: CanaryDeclined) -> str:
    """Return the reason of a decline, with a canary's words for a reference step."""
    return str(reason).replace("a canary", "a reference step").replace("the canary", "it")
