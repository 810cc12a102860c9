"""The false-alarm budget that all statistical detectors share.

A healthy run of N steps raises any statistical finding with a probability of at most
``N / THRESHOLD``. Each family of detectors owns a share s of it: its e-detector M, whose
expectation after n healthy steps is at most n, alarms at ``THRESHOLD / s``. The shares sum to 1,
so that the probabilities of all families sum to the promise.
"""

from decimal import ROUND_CEILING, Context, Decimal

THRESHOLD = 1e6

OUTLIERS = 0.9
"""Share of the search for workers that differ from the others, half totals and half groups."""

PAIRS = 0.05
"""Share of the search for workers that resemble each other too much."""

SAMPLING = 0.05
"""Share of the comparison of workers with what sampling explains."""

assert OUTLIERS + PAIRS + SAMPLING <= 1.0

FAR_BELOW = 0.99
"""Part of a level below which a bound on the evidence decides; rounding changes sums far less."""


def alarm_level(share: float) -> float:
    """Return the value of an e-detector at which a family with this share of the budget alarms."""
    return THRESHOLD / share


def false_alarm_bound(num_steps: int) -> float:
    """Return the largest probability that a healthy run of so many steps raises any finding."""
    return min(1.0, num_steps / THRESHOLD)


def bound_in_words(num_steps: int) -> str:
    """Return the bound with one digit, rounded up, so that what is said of it stays true.

    >>> bound_in_words(300), bound_in_words(14_900)
    ('0.0003', '0.02')
    """
    bound = Context(prec=1, rounding=ROUND_CEILING).divide(Decimal(num_steps), Decimal(THRESHOLD))
    return f"{min(1.0, float(bound)):.1g}"
