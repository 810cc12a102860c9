"""Thin adapters: one line in a framework, or none in a script."""
