"""A clock that is moved by hand."""

from hiddenstate.testing import FakeClock


def test_it_stands_still_until_it_is_moved():
    clock = FakeClock(5.0)
    assert [clock(), clock()] == [5.0, 5.0]
    clock.advance(2.5)
    assert clock() == clock.now == 7.5
