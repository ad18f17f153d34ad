import sys
import time

import pytest

from hiddenstate.measure import progress
from hiddenstate.measure.progress import tracked


class Bar:
    made: list = []  # noqa: RUF012

    def __init__(self, label, total):
        self.task_ids, self.seen, self.stopped = [7], [], False
        self.label, self.total = label, total
        Bar.made.append(self)

    def update(self, task, completed):
        assert task == 7
        self.seen.append(completed)

    def stop(self):
        self.stopped = True


@pytest.fixture
def terminal(monkeypatch):
    Bar.made = []
    clock = iter(range(1000))
    monkeypatch.setattr(progress, "_bar", Bar)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))


def test_items_pass_through():
    assert list(tracked(iter("abc"), "work", 3)) == ["a", "b", "c"]


@pytest.mark.usefixtures("terminal")
def test_a_bar_appears_after_two_seconds_and_goes_away():
    list(tracked(range(6), "work", 6))  # one second each
    (bar,) = Bar.made
    assert (bar.label, bar.total) == ("work", 6)
    assert bar.seen == [3, 4, 5, 6]
    assert bar.stopped


@pytest.mark.usefixtures("terminal")
def test_short_work_has_no_bar():
    list(tracked(range(2), "work", 2))
    assert Bar.made == []


@pytest.mark.usefixtures("terminal")
def test_nobody_watching_means_no_bar(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    list(tracked(range(6), "work", 6))
    assert Bar.made == []


@pytest.mark.usefixtures("terminal")
def test_an_interruption_takes_the_bar_away():
    work = tracked(range(9), "work", 9)
    for item in work:
        if item == 5:
            work.close()
    assert Bar.made[0].stopped


def test_the_real_bar_starts_and_stops():
    bar = progress._bar("work", 3)
    bar.update(bar.task_ids[0], completed=3)
    bar.stop()
    assert bar.finished
