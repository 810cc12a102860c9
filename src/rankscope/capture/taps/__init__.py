"""Where DDP, FSDP2, DeepSpeed and Megatron-core show their gradients."""
