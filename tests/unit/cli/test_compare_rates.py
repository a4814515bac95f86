"""Rates as people write them."""

import pytest

from services.cli.lab.rates import Rate, parse_rates
from shared.errors import ConfigError


def test_rates_are_absolute_or_shares_of_the_capacity():
    """A per cent sign makes a share; both turn into queries per second."""
    absolute, share = parse_rates("0.2, 50%")
    assert absolute.qps(10.0) == 0.2
    assert share.qps(10.0) == 5.0


def test_a_series_goes_on_in_its_step():
    """`50%,60%..100%` names six loads, rounded to what a person would write."""
    rates = parse_rates("50%,60%..100%")
    assert [rate.value for rate in rates] == [0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    assert parse_rates("0.1,0.2..0.4") == (Rate(0.1), Rate(0.2), Rate(0.3), Rate(0.4))


def test_a_series_that_misses_its_end_stops_before_it():
    """The step rules; the end is never exceeded."""
    assert [rate.value for rate in parse_rates("1,2..3.5")] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0", "above 0"),
        ("0%", "above 0"),
        ("-1", "'-1'"),
        ("fast", "'fast'"),
        ("", "''"),
        ("0.2,,0.4", "''"),
        ("nan", "'nan'"),
        ("1e999", "above 0"),
        ("50%..100%", "two rates"),
        ("2,1..5", "rise"),
        ("1,2..1", "rise"),
        ("1,2%..5", "one unit"),
        ("0.2,0.2", "twice"),
        ("1,1.0001..9", "more than"),
    ],
)
def test_what_is_no_rate_is_refused(text: str, said: str):
    """The message names the option's text and what is wrong."""
    with pytest.raises(ConfigError, match="--rates") as caught:
        parse_rates(text)
    assert said in str(caught.value)
