"""Runs ``trl.scripts.sft`` on CPU with ``--activation_offloading``, which asks for an accelerator.

The CPU stands for it: activations are copied, as they are from an accelerator, in one stream.
"""

import runpy
from functools import partial

import torch
import trl.models

torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cpu")
trl.models.get_act_offloading_ctx_manager = partial(
    trl.models.get_act_offloading_ctx_manager, use_pin_memory=False, use_streams=False
)
runpy.run_module("trl.scripts.sft", run_name="__main__", alter_sys=True)
