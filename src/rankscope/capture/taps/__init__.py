"""Where each way of going data parallel shows its gradients: DDP, FSDP2, DeepSpeed."""
