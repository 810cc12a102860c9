"""What is promised of a healthy run, in numbers and in words."""

from decimal import Decimal

from rankscope.stats.bets import bound_in_words, false_alarm_bound


def test_a_bound_in_words_is_never_below_the_bound_nor_a_digit_above_it():
    for num_steps in (*range(1, 3_000, 7), *range(3_000, 10**6, 9_973)):
        exact, said = Decimal(num_steps) / 10**6, Decimal(bound_in_words(num_steps))
        assert float(exact) == false_alarm_bound(num_steps)
        assert exact <= said < exact + Decimal(10) ** exact.adjusted()
