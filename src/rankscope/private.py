"""Private names of torch and of frameworks: their use, its reason, and the effect of their lack.

None of these names is promised to stay. So each stands in :data:`USES`, a test holds the table
against the source and against the installed releases, and training goes on without any of them:
the part that needs a name is off then, with one line in the log, or ``watch`` refuses before the
first step.

:class:`Patch` replaces attributes of others' objects, and restores them. This module imports
nothing heavy: ``rankscope run`` needs it before torch is there.
"""

import functools
import logging
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple, Self

from rankscope.errors import UnsupportedError

_log = logging.getLogger("rankscope")

_NOTHING = object()


class Patch:
    """A replacement of an attribute of a module, class or object, until it is removed.

    Args:
        owner: The holder of the attribute, itself or by its class.
        name: Its name.
        make: Returns the replacement, given the present value, None if there is none.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self._owner = owner
        self._name = name
        self._kept = vars(owner).get(name, _NOTHING)  # as it is stored: a class binds functions
        self.original = getattr(owner, name, None)
        """The value before."""
        self._put = make(self.original)
        setattr(owner, name, self._put)

    @property
    def in_place(self) -> bool:
        """Whether nobody else has replaced it since."""
        return vars(self._owner).get(self._name, _NOTHING) is self._put

    def remove(self) -> None:
        """Leave the owner as it was, unless somebody else has replaced the attribute since."""
        if not self.in_place:
            return
        if self._kept is _NOTHING:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._kept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def callers() -> Iterator[FrameType]:
    """Yield the frames around the calling function: that of its caller first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def find(path: str) -> Any:
    """Return the object at a dotted path, by imports and then by attributes; None without it."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return None


class Use(NamedTuple):
    """Private names that are used for one purpose.

    Attributes:
        owner: Dotted path of the module or class that has them; of a class, its objects may.
        names: The names, separated by spaces.
        why: Their purpose.
        without: The effect where one is missing.
        need: The key of :func:`lacking`; empty if their users look themselves.
        releases: Of a name that not all supported releases have: which ones do.
    """

    owner: str
    names: str
    why: str
    without: str
    need: str = ""
    releases: str = ""


def lacking(need: str) -> list[str]:
    """Return the names of a need, by their full paths, that this installation lacks."""
    rows = [use for use in USES if use.need == need]
    owners = [(use, find(use.owner)) for use in rows]
    return [f"{use.owner}.{n}" for use, o in owners for n in use.names.split() if not hasattr(o, n)]


@functools.cache
def available(need: str) -> bool:
    """Return whether all names of a need are there; if not, log once what is off without them."""
    missing = lacking(need)
    if missing:
        level = logging.WARNING if os.environ.get("RANK", "0") == "0" else logging.INFO
        without = next(use.without for use in USES if use.need == need)
        _log.log(level, "%s: %s without %s", without, _torch(), ", ".join(missing))
    return not missing


def require(need: str) -> None:
    """Refuse to go on without the names of a need.

    Raises:
        UnsupportedError: One of them is missing.
    """
    missing = lacking(need)
    if missing:
        raise UnsupportedError(
            f"watching expected {', '.join(missing)}, which {_torch()} lacks; use another release "
            "of torch or of rankscope"
        )


def _torch() -> str:
    return f"torch {getattr(sys.modules.get('torch'), '__version__', '')}"


_REFUSES = "watch refuses: UnsupportedError"
_SWITCHES_OFF = "the monitor switches itself off in the first step, with one warning"
_FSDP = "torch.distributed.fsdp._fully_shard"
_DDP = "torch.nn.parallel.DistributedDataParallel"
_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"

USES = (
    # The backward pass
    Use(
        "torch._C",
        "_current_graph_task_id",
        "whether this thread runs a backward pass, and which",
        _REFUSES,
        need="backward",
    ),
    Use(
        "torch.autograd.Variable",
        "_execution_engine",
        "what is to run at the end of a backward pass; canaries must not accumulate gradients",
        _REFUSES,
        need="backward",
    ),
    Use(
        "torch.Tensor",
        "_post_accumulate_grad_hooks",
        "the local gradient of a model without wrapper, before hooks of the training's reduce it",
        "such hooks run before the local gradient is read",
    ),
    Use(
        "torch.autograd",
        "_make_grads",
        "the roots of a backward pass, which are the losses that no model's output holds",
        "losses outside of the model's output are not recorded",
        need="roots",
    ),
    Use(
        "torch.Tensor",
        "_backward_hooks",
        "a hook on what the model returns, without the handle that register_hook makes",
        "register_hook is called",
    ),
    Use(
        "torch.autograd.graph.Node",
        "_register_hook_dict",
        "likewise",
        "register_hook is called",
    ),
    Use(
        "torch.autograd.graph.Node",
        "_saved_other _saved_self _saved_reduction _saved_weight _saved_total_weight"
        " _saved_target _saved_ignore_index _saved_self_sym_numel _saved_self_sym_sizes"
        " _input_metadata",
        "what a loss was divided by or multiplied with, its targets, and over how many tokens it is"
        " a mean",
        "the loss counts as it is, with an unknown weight; parity counts the label tokens that the"
        " model is given, if any",
    ),
    Use(
        "torch.autograd.graph.Node",
        "_raw_saved_other _raw_saved_self _raw_saved_weight _raw_saved_total_weight"
        " _raw_saved_target",
        "whether a hook of the training's has packed what would be read",
        "it is unpacked, as a backward pass does",
    ),
    # Tensors
    Use(
        "torch.Tensor",
        "_version",
        "whether a gradient, a buffer or a copy was written since it was read",
        _SWITCHES_OFF,
    ),
    Use(
        "torch._dynamo.eval_frame",
        "cached_backends",
        "whether anything is compiled, which would run otherwise while a loss is recorded",
        "losses that exchange tensors are not run again where torch's compiler is loaded",
    ),
    Use(
        "torch.utils._python_dispatch",
        "TorchDispatchMode _get_current_dispatch_mode_stack _pop_mode _push_mode",
        "to record what a loss computes, from the model's outputs to ``backward``",
        "losses that exchange tensors are not run again",
        need="tape",
    ),
    Use(
        "torch.Tensor",
        "_indices _values",
        "sparse gradients and state that is not coalesced",
        _SWITCHES_OFF,
    ),
    Use(
        "torch.Tensor",
        "_is_view",
        "to put back what a canary's forward pass changes",
        "no canaries",
        need="canary",
    ),
    Use(
        "torch.UntypedStorage",
        "_cdata",
        "whether two tensors share their memory",
        "no canaries",
        need="canary",
    ),
    Use(
        "torch.Generator",
        "_cdata",
        "which generator an operation draws from",
        "no canaries",
        need="canary",
    ),
    Use(
        "torch._C._autograd",
        "_unsafe_set_version_counter",
        "to put back how often a tensor was written",
        "no canaries",
        need="canary",
    ),
    # Exchanges in a forward pass
    Use(
        "torch.distributed.ProcessGroup",
        "_allgather_base",
        "tensors that the model's forward pass gathers from other workers",
        "workers that differ as they have parts of the same sequences may be a warning",
    ),
    Use(
        "torch.distributed._functional_collectives",
        "permute_tensor",
        "likewise, by torch's functional collectives",
        "likewise",
    ),
    Use(
        "torch.distributed._functional_collectives",
        "AsyncCollectiveTensor wait_tensor",
        "what such a collective of a loss returns, and its end",
        "reference steps cannot be made",
    ),
    # Collectives in a hang
    Use(
        "torch._C._distributed_c10d",
        "_dump_fr_trace_json",
        "the collectives that torch's Flight Recorder holds",
        "hangs are reported without the collective",
    ),
    Use(
        "torch._C._distributed_c10d",
        "_dump_nccl_trace_json",
        "likewise of NCCL",
        "hangs are reported without the collective, unless the backend is gloo",
        releases="those that are built with NCCL",
    ),
    # What surrounds the training's call
    Use(
        "torch._C._autograd",
        "_top_saved_tensors_default_hooks _pop_saved_tensors_default_hooks"
        " _push_saved_tensors_default_hooks _saved_tensors_hooks_get_disabled_error_message"
        " _saved_tensors_hooks_enable _saved_tensors_hooks_disable",
        "to leave checkpoints and offloading for as long as the monitor works",
        "they see the monitor's work; no canaries",
        need="canary",
    ),
    Use(
        "torch._C._autograd",
        "_profiler_enabled _enable_record_function",
        "to show a profiler the training alone",
        "no canaries",
        need="canary",
    ),
    Use(
        "torch._C",
        "_InferenceMode",
        "to leave inference mode, whose tensors cannot be written outside of it",
        "no canaries",
        need="canary",
    ),
    Use(
        "torch._C._profiler",
        "_RecordFunctionFast",
        "the one range that a profiler sees of the monitor",
        "no canaries",
        need="canary",
    ),
    Use(
        "torch._C",
        "DisableTorchFunctionSubclass",
        "to read a loss of the training's own class of tensors without its functions",
        "rankscope run sees no losses that the model does not return, with one warning",
    ),
    Use(
        "torch._C",
        "_len_torch_dispatch_stack _get_dispatch_stack_at _pop_torch_dispatch_stack"
        " _push_on_torch_dispatch_stack _len_torch_function_stack _get_function_stack_at"
        " _pop_torch_function_stack _push_on_torch_function_stack",
        "to leave the training's modes for as long as the monitor works",
        "they see the monitor's work; no canaries",
        need="canary",
    ),
    Use(
        "torch._C",
        "_are_functorch_transforms_active _get_tracing_state _get_dispatch_mode"
        " _TorchDispatchModeKey",
        "whether a forward pass is transformed or traced, and none of the training's",
        "it counts as one of the training's; no canaries",
        need="canary",
    ),
    Use(
        "torch.utils._device",
        "DeviceContext",
        "the default device of the training's forward pass",
        "no canaries",
        need="canary",
    ),
    Use(
        "torch.autograd.forward_ad",
        "_current_level",
        "whether tensors carry tangents, which a canary's would not",
        "no canaries",
        need="canary",
    ),
    Use(
        "torch.nn.modules.module",
        "_global_forward_pre_hooks _global_forward_hooks _global_backward_pre_hooks"
        " _global_backward_hooks",
        "to run a model without the hooks that the training has on all modules",
        "no canaries",
        need="canary",
    ),
    # Dispatch
    Use(
        "torch.utils._python_dispatch",
        "_get_current_dispatch_mode_stack",
        "whether a backward pass is one inside of a canary",
        "no canaries",
        need="canary",
    ),
    Use(
        "torch.utils._python_dispatch",
        "TorchDispatchMode is_traceable_wrapper_subclass",
        "to see operators, and tensors that are made of others",
        _REFUSES,
    ),
    Use(
        "torch.ops.aten",
        "_to_copy",
        "which detached tensors are copies of each other, in another type",
        "a reference step follows a detached tensor no further than to its conversion",
    ),
    Use(
        "torch._ops.OpOverload",
        "_schema",
        "which arguments an operator writes into, and along which axis it chooses",
        "a canary, and the preflight, take it for one that writes nothing",
    ),
    Use(
        "torch.utils._pytree",
        "tree_flatten tree_map",
        "the tensors among an operator's arguments",
        "the preflight does not look for operators that are not deterministic",
        need="operators",
    ),
    # Compiled models
    Use(
        "torch._C._dynamo.eval_frame",
        "get_eval_frame_callback",
        "whether a hook is about to be traced",
        "hooks are always called past the compiler, which takes longer",
    ),
    Use(
        "torch._C._dynamo.eval_frame",
        "set_code_exec_strategy _FrameExecStrategy _FrameAction",
        "that the compiler leaves hooks alone which autograd calls in a compiled step",
        "such a step compiles the monitor's hooks, which takes minutes",
    ),
    Use(
        "torch._dynamo.eval_frame",
        "OptimizedModule _orig_mod",
        "the model inside of a compiled one, and its calls; what the compiler logs is kept out of"
        " the output",
        "a compiled model is not recognised, and watch refuses it",
    ),
    Use(
        "torch.nn.Module",
        "_compiled_call_impl",
        "whether Module.compile was called, for hooks would break the graph of such a module: they"
        " run around the compiled call",
        "it counts as one that is not compiled",
    ),
    Use(
        "torch.nn.Module",
        "_call_impl _forward_pre_hooks _forward_hooks _backward_pre_hooks",
        "which module runs an operation of a canary, and whether a hook of it does",
        "operations of a canary are named without their module",
    ),
    Use(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "_checkpoint_wrapped_module",
        "one name for a parameter, with and without activation checkpointing",
        "parameters have longer names",
    ),
    Use(
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "_fsdp_wrapped_module",
        "likewise under FSDP1",
        "parameters have longer names",
    ),
    Use(
        "torch.utils.data.dataloader._MultiProcessingDataLoaderIter",
        "_BaseDataLoaderIter _dataset _workers _num_yielded _IterableDataset_len_called"
        " _next_index _index_sampler _send_idx _rcvd_idx _in_order",
        "what a data loader yields, as it is, where it ends, which rows of its data set that are,"
        " and whether it has processes",
        "samples are compared by the inputs of the model alone",
    ),
    Use(
        "torch.distributed.tensor.DTensor",
        "_local_tensor",
        "this rank's part of a parameter, without an operation that a mode of the training's sees",
        _SWITCHES_OFF,
    ),
    # Modules
    Use(
        "torch.nn.Module",
        "_modules _parameters _buffers",
        "what hangs in a module, without the cost of its generators",
        _REFUSES + ", or " + _SWITCHES_OFF,
    ),
    Use(
        "torch.nn.modules.batchnorm",
        "_NormBase _BatchNorm",
        "which buffers are running statistics",
        "running statistics of every module may differ; the preflight finds no batch norm",
    ),
    Use(
        "torch.nn.Module",
        "_non_persistent_buffers_set",
        "which buffers no checkpoint holds",
        "such a buffer that differs between workers is an error as any other",
    ),
    Use(
        "torch.optim.Optimizer",
        "_optimizer_step_pre_hooks _optimizer_step_post_hooks",
        "which of several wrapped optimizers takes hooks, and which hooks change an update",
        "no settings and no time of the optimizer are recorded",
    ),
    Use(
        "torch.nn.utils.clip_grad",
        "_get_total_norm _clip_grads_with_norm_",
        "to which norm gradients are clipped, and from which",
        "clipping is judged by its effect alone, unless the plan has max_norm",
    ),
    # DDP
    Use(
        _DDP,
        "_comm_hooks _get_ddp_logging_data",
        "whether, and in which hook, something else reduces",
        "the run's facts name no hook; fixed_order and order_free refuse",
    ),
    Use(
        _DDP,
        "_join_config _divide_by_initial_world_size",
        "over how many workers a mean is taken in model.join()",
        "fixed_order and order_free refuse, or divide by the initial number",
    ),
    Use(
        _DDP,
        "_module_parameters",
        "which parameters DDP reduces",
        "it counts as reducing all",
    ),
    Use(
        _DDP,
        "_use_python_reducer _delay_all_reduce_params",
        "ways of reducing in which hooks do not see local gradients",
        "they count as not being used",
    ),
    Use(
        _DDP,
        "_sync_buffers _match_all_reduce_for_bwd_pass",
        "when DDP broadcasts buffers, and which steps a worker without data only shadows",
        "the wait for a broadcast is part of the forward pass; shadowed steps are not observed",
    ),
    Use(
        _DDP,
        "_active_ddp_module",
        "whether a model was wrapped anew",
        "the run goes on with the old wrapper",
    ),
    Use(
        _DDP,
        "_ddp_ignored",
        "which buffers DDP does not broadcast",
        "none is taken for one of these",
    ),
    Use(
        "torch.distributed.Reducer",
        "_get_zeros_like_grad_buckets",
        "which parameters are in DDP's buckets",
        "order_free refuses",
    ),
    # The composable replicate
    Use(
        "torch.distributed._composable.contract",
        "_get_registry",
        "whether replicate was applied to a model",
        "a model under replicate is refused",
    ),
    Use(
        "torch.distributed._composable.replicate",
        "replicate _ddp",
        "the DDP that reduces for it",
        "a model under replicate is refused",
    ),
    Use(
        "torch.distributed",
        "_composable",
        "which classes replicate puts in the place of a module's own",
        "no reference step under replicate",
    ),
    # FSDP2
    Use(
        f"{_FSDP}._fsdp_state",
        "_register_root_post_backward_final_callback _root_post_backward_final_callback"
        " _state_ctx _mp_policy",
        "when a backward pass begins and ends; in which precision it reduces",
        _REFUSES,
    ),
    Use(
        f"{_FSDP}._fsdp_state",
        "_end_backward_iteration",
        "when the reductions of a backward pass are over",
        "the end of the backward pass counts",
        releases="torch 2.15",
    ),
    Use(
        f"{_FSDP}._fsdp_state",
        "_fsdp_param_group _fsdp_param_groups",
        "what is reduced together; one name is that of older releases",
        _REFUSES,
        releases="each has one of them",
    ),
    Use(
        f"{_FSDP}._fsdp_param_group",
        "_all_reduce_hook _partial_reduce_output _reduce_scatter_comm",
        "whether, over which workers, and by whom it was reduced",
        _REFUSES,
    ),
    Use(
        f"{_FSDP}._fsdp_param",
        "_module_info _orig_size _unsharded_param",
        "a parameter's name, its place, and its gradient that is not reduced yet",
        _REFUSES,
    ),
    Use(
        f"{_FSDP}._fully_shard.FSDPModule",
        "_get_fsdp_state",
        "FSDP2's own objects",
        _REFUSES,
    ),
    Use(
        "torch.distributed.device_mesh.DeviceMesh",
        "_get_root_mesh",
        "the other axes of the mesh from which FSDP2's own was cut",
        "only the axes that placements of parameters name are known",
    ),
    Use(
        "torch.distributed.pipelining.schedules._PipelineSchedule",
        "_loss_fn",
        "the losses of a pipeline's last stage",
        "they are not recorded",
    ),
    # Process groups
    Use(
        "torch.distributed.distributed_c10d",
        "_get_default_store",
        "the store through which ranks find each other's monitor",
        _REFUSES,
    ),
    Use(
        "torch.distributed.distributed_c10d",
        "_world",
        "the process groups of a training, and the ranks of each",
        "all ranks are workers of a model without wrapper, or it is not watched; a hang is reported"
        " without ranks that have entered no collective of a group",
    ),
    Use(
        "torch.distributed.ProcessGroup",
        "_device_types _get_backend",
        "after how many seconds a collective fails",
        "ranks wait for each other for the time that the caller sets",
    ),
    Use(
        "torch._C._distributed_c10d.Backend.Options",
        "_timeout",
        "likewise",
        "ranks wait for each other for the time that the caller sets",
    ),
    Use(
        "torch.nn.parallel.distributed",
        "_DDPSink",
        "that a loss is a sum over an output of the model's own",
        "the number of its label tokens is not known",
    ),
    # Frameworks
    Use(
        "datasets.iterable_dataset.IterableDataset",
        "_distributed",
        "over how many ranks a streamed data set is split",
        "a data set that is split twice is not named",
    ),
    Use(
        _ENGINE,
        "_backward_prologue _backward_epilogue _take_model_step",
        "when a backward pass begins and ends, and when the engine steps",
        _REFUSES,
    ),
    Use(
        _ENGINE,
        "_unmanaged_backward_count _is_gradient_accumulation_boundary",
        "whether watching begins in the middle of a step",
        "it counts as beginning with one",
    ),
    Use(
        "deepspeed.runtime.bf16_optimizer",
        "_hp_grad",
        "gradients in float32 of bf16 parameters",
        "the step is not observed",
    ),
    Use(
        "deepspeed.utils.tensor_fragment",
        "_hp_mapping",
        "which elements of a parameter DeepSpeed's ZeRO 1 or 2 keeps in a rank's flat tensor",
        "parity has no step to compare, and says so",
    ),
    Use(
        "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3",
        "_z3_optimizer",
        "likewise under ZeRO 3",
        "parity has no step to compare, and says so",
        releases="0.19; parameters have it",
    ),
    Use(
        "torch.distributed.pipelining.schedules.PipelineScheduleMulti",
        "_stages",
        "the stages of a pipeline on one rank",
        "parity sees the first one alone, and says that the parameters of both sides differ",
    ),
    Use(
        "torch.distributed.pipelining.stage._PipelineStageBase",
        "_forward_metadata_inference",
        "a pass in which a pipeline's schedule looks for shapes, and which trains nothing",
        "parity counts the samples of the first step twice",
        releases="torch 2.13; earlier ones use empty tensors",
    ),
    Use(
        "deepspeed.runtime.zero.stage_1_and_2",
        "_zero_padding",
        "which shards are padding",
        "they count as shards",
    ),
    Use(
        "transformers.trainer",
        "_run_epoch _finalize_training",
        "to close the run as incomplete when a training raises",
        "other methods are looked at; the run ends with its process",
    ),
    Use(
        "accelerate.accelerator.Accelerator",
        "_models",
        "to know which of several accelerators trains the watched model",
        "the settings of the first one that lives are compared",
    ),
    Use(
        "trl.trainer.grpo_trainer.GRPOTrainer",
        "_get_per_token_logps_and_entropies",
        "the trainer's log-probabilities where the inputs of its loss hold the rollout's alone",
        "rollout_gap is recorded only where they hold both, as with vLLM",
    ),
    Use(
        "ray.train.v2._internal.execution.context",
        "get_train_context",
        "to keep a worker until its run is written",
        "the run is closed as a complete one also after an error, maybe without its last step",
    ),
    Use(
        "mlflow.tracking.fluent",
        "_get_latest_active_run",
        "the run that the training opened in another thread",
        "a run of its own is opened",
    ),
)
"""Every private name that the source uses; names of Python's own are not among them."""
