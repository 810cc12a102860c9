"""Reductions of the project's own: the only collectives among training processes that are ours."""
