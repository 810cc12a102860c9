"""Floating-point sums: their error in any order, and what parts two runs."""
