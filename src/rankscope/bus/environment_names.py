"""Names of the facts of a rank's environment, and which may differ between ranks."""

PACKAGES = (
    "transformers",
    "accelerate",
    "deepspeed",
    "lightning",
    "pytorch-lightning",
    "trl",
    "peft",
    "datasets",
    "tokenizers",
    "triton",
    "flash-attn",
)
"""Packages whose versions are recorded where they are installed."""

OWN = frozenset(
    {
        "device_memory",
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "LOCAL_WORLD_SIZE",
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "ASCEND_DEVICE_ID",
        "ASCEND_VISIBLE_DEVICES",
        "ASCEND_RT_VISIBLE_DEVICES",
        "NCCL_HOSTID",
    }
)
"""Facts in which ranks may differ in a healthy job."""

PLACES = ("_DIR", "_HOME", "_PATH", "_CACHE", "_FILE", "_IFNAME", "_HCA")
"""Endings of variables that name a place, which every host may have elsewhere."""

DECIDES_BITS = frozenset({"NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"})
"""Variables that change the precision of what is computed, not only how fast."""

HARMLESS = frozenset({"driver", "cpu_capability"})
"""Facts in which hosts may differ in a healthy job."""


def is_compared(name: str) -> bool:
    """Return whether a fact should be equal on all ranks."""
    return name not in OWN and not (name.isupper() and name.endswith(PLACES))
