"""Measurements of one worker."""
