import gc

import pytest

from benchmarks.timing import compare


@pytest.fixture(autouse=True)
def nothing_to_collect(monkeypatch):
    """After thousands of other tests, to look through all their objects takes seconds, for each round."""
    monkeypatch.setattr("benchmarks.timing.gc.collect", lambda: 0)


class Clock:
    """A clock that only rivals move."""

    def __init__(self):
        self.now = 0.0
        self.turns = []

    def __call__(self):
        return self.now

    def rival(self, name, seconds):
        def call():
            self.turns.append(name)
            # A machine that grows slower with every call: rounds still agree on the ratio.
            self.now += seconds * (1 + len(self.turns) // 2)

        return call


def test_ratios_are_to_the_first_rival_whatever_the_machine_does():
    clock = Clock()
    result = compare({"plain": clock.rival("plain", 1.0), "twice": clock.rival("twice", 2.0)}, warmup=1, clock=clock)
    assert result.ratios["plain"] == 1
    assert result.ratios["twice"] == pytest.approx(2, rel=0.05)
    assert result.spread["plain"] == (1, 1)
    assert result.seconds["twice"] > result.seconds["plain"]


def test_rivals_take_turns_and_each_goes_first_equally_often():
    clock = Clock()
    compare({name: clock.rival(name, 1.0) for name in "abc"}, rounds=3, warmup=0, clock=clock)
    assert "".join(clock.turns) == "abc" + "abc" + "bca" + "cab"


def test_a_quick_rival_is_repeated_within_its_turn_and_all_equally_often():
    clock = Clock()
    compare({"a": clock.rival("a", 1e-9), "b": clock.rival("b", 1.0)}, rounds=2, warmup=0, at_least=1e-8, clock=clock)
    assert clock.turns[:2] == ["a", "b"]
    assert clock.turns[2:].count("a") == clock.turns[2:].count("b") > 2


def test_the_garbage_collector_is_back_also_after_an_exception():
    calls = iter([None, None, None])
    with pytest.raises(StopIteration):
        compare({"a": lambda: next(calls)}, warmup=1, at_least=0)
    assert gc.isenabled()


def test_the_table_names_every_rival_and_the_versions():
    clock = Clock()
    text = str(compare({"plain": clock.rival("plain", 1.0), "other": clock.rival("other", 3.0)}, clock=clock))
    assert "plain" in text
    assert "other" in text
    assert "torch" in text
    assert "hiddenstate 0." in text


def test_too_few_rounds_are_refused():
    with pytest.raises(ValueError, match="1 rivals in 1 rounds: at least one rival and two rounds"):
        compare({"a": int}, rounds=1)
