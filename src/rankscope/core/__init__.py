"""What the numbers mean: the signal registry and pure numpy functions.

No torch, no files, no clock and no communication: everything here can be checked by hand.
"""
