"""The laboratory: the paper's study, numerics, reproducible reductions."""
