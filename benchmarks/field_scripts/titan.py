"""Runs ``torchtitan.train`` on CPU: torch.cpu and gloo get what it asks of an accelerator."""

import logging
import os
import runpy
from types import SimpleNamespace

import torch
import torch._utils
from torch.distributed.fsdp import FSDPModule

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.current_device = lambda: 0
torch.cpu.get_device_name = lambda device=None: "CPU"
torch.cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=2**34)
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None
torch.cpu.memory_stats = lambda device=None: dict.fromkeys(
    ("active_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries", "num_ooms"), 0
)
divide = FSDPModule.set_gradient_divide_factor


def divide_and_sum(module, factor):
    divide(module, factor)
    module.set_force_sum_reduction_for_comms(True)  # gloo multiplies nothing while it sums


FSDPModule.set_gradient_divide_factor = divide_and_sum
if os.environ["RANK"] != "0":
    logging.disable(logging.INFO)  # every rank logs the same losses
runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)
