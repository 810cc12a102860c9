"""The same batches run on every worker: kept, repeated, compared, and all put back."""
