"""Tests of the usual pace, which ``make eager`` leaves out: each with its reason."""

USUAL = {
    "tests/scope/test_canary.py::test_a_worker_with_bad_labels_has_bad_data_and_nothing_else": (
        "one canary of a finding is expected in 70 steps, where many follow each other"
    ),
}
"""Beginnings of what pytest calls tests, and why they need the usual pace."""
