"""Copies of the watched model beside it: averages of its weights, and models that are given them."""

from rankscope.bus.evidence import Evidence

KEY = "copies"
"""Its name in messages, and the beginning of the names of its rows in the table of digests."""

AGAIN = ", number "
"""Between a copy's label and its number, where several have one label."""

EVIDENCE = Evidence(KEY, __name__, held=KEY)
