"""The one bound that all services of a mesh share at its end."""

import pytest

from services.cli.ending import Ending


def test_services_that_stop_one_after_another_share_one_bound():
    """What the first one used is not there for the next; beginning again starts nothing anew."""
    now_s = 100.0
    ending = Ending(15.0, lambda: now_s)
    now_s = 500.0
    assert ending.left_s == 15.0  # a mesh that runs has all of it
    ending.begin()
    now_s = 510.0
    ending.begin()
    assert ending.left_s == pytest.approx(5.0)
    now_s = 600.0
    assert ending.left_s == 0.0
