"""Tests of the usual pace, which ``make eager`` leaves out: each with its reason."""

USUAL: dict[str, str] = {}
"""Beginnings of what pytest calls tests, and why they need the usual pace."""
