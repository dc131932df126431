"""Rates, times and counts as users write them, and the checks of arguments."""

import math

import numpy as np
import pytest

from palsgd import units
from palsgd.checks import below, check_choice, check_int, check_number


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("100mbit", 1e8),
        ("1Gbit", 1e9),
        ("8kbit/s", 8e3),
        ("2MB/s", 1.6e7),
        ("5 b", 5.0),
        (7.5, 7.5),
    ],
)
def test_a_rate_is_bits_per_second_and_a_large_b_means_bytes(text, bits):
    assert units.rate("rate", text) == bits


@pytest.mark.parametrize("text", ["fast", "1.2.3mbit", "mbit", "10 furlongs"])
def test_what_is_no_rate_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match=f"rate='{text}' is no rate; write for instance '100mbit'"):
        units.rate("rate", text)


@pytest.mark.parametrize("value", [0, -1.0, "0mbit", math.nan, True, None])
def test_a_rate_of_nothing_is_refused(value):
    with pytest.raises(ValueError, match="must be more than 0 bit/s"):
        units.rate("rate", value)


def test_text_with_a_unit_means_the_same_time_everywhere_and_a_bare_number_the_functions_unit():
    assert units.seconds("t", "20ms") == pytest.approx(0.02)
    assert units.milliseconds("t", "20ms") == 20.0
    assert units.milliseconds("t", "50us") == pytest.approx(0.05)
    assert units.milliseconds("t", "1min") == 60_000
    assert units.seconds("t", "20") == units.seconds("t", 20) == 20.0
    assert units.milliseconds("t", "20") == units.milliseconds("t", 20) == 20.0


def test_a_time_of_zero_is_refused_unless_it_may_be_zero():
    assert units.milliseconds("latency", "0", zero=True) == 0.0
    with pytest.raises(ValueError, match="latency='0ms' must be a time of more than 0 ms"):
        units.milliseconds("latency", "0ms")
    with pytest.raises(ValueError, match="latency='-1' must be a time of 0 ms or more"):
        units.milliseconds("latency", "-1", zero=True)


def test_a_count_knows_thousands_millions_and_billions():
    assert [units.count("n", text) for text in ("5", "2k", "8M", "70B")] == [5, 2000, 8e6, 7e10]
    with pytest.raises(ValueError, match="n=0 must be at least 1"):
        units.count("n", 0)


@pytest.mark.parametrize("value", [True, 1.0, "1", None, -1])
def test_a_whole_number_is_no_bool_no_float_and_not_below_the_least(value):
    with pytest.raises(ValueError, match=r"steps=.* must be a whole number >= 0"):
        check_int("steps", value)
    assert check_int("steps", np.int64(3)) == 3


def test_limits_are_strict_and_the_number_below_a_limit_lets_it_pass():
    with pytest.raises(ValueError, match=r"p=1\.0 must be in"):
        check_number("p", 1.0, "in [0, 1)", low=below(0), high=1.0)
    assert check_number("p", 0, "in [0, 1)", low=below(0), high=1.0) == 0.0
    with pytest.raises(ValueError, match="p='zero' must be in"):
        check_number("p", -1.0, "in [0, 1)", low=0.0, shown="zero")


def test_an_unknown_choice_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="draws='even' is unknown; use one of 'odd', 'all'"):
        check_choice("draws", "even", ("odd", "all"))
