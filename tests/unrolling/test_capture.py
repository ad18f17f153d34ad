"""Passes are recorded for lengths that come back, and for no others; beyond a few, the oldest is given up."""

import pytest
import torch

import hiddenstate as hs
from hiddenstate.errors import Untraceable
from hiddenstate.unrolling import capture
from hiddenstate.unrolling.cache import cell_known
from hiddenstate.unrolling.capture import Captures
from tests.support.cells import INPUT, PairCell


class Stub:
    """A recording that is none: it says what it was made for, and needs no GPU."""

    size = 8

    def __init__(self, function, samples):
        self.made, self.bytes = function(samples), self.size

    def __call__(self, tensors):
        return self.made


@pytest.fixture
def memory(monkeypatch):
    """A device of 1,600 bytes, of which a pass may hold a hundred."""
    monkeypatch.setattr(capture, "Captured", Stub)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("", (), {"total_memory": 1600}))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def captures(check=lambda ours, theirs: None):
    return Captures(lambda tensors: ["run"], lambda tensors: ["recorded"], check)


def called(one, steps, times):
    return [one(steps, [torch.zeros(2)])[0] for _ in range(times)]


def test_a_length_is_recorded_when_it_comes_back_twice(memory):
    assert called(captures(), 7, 5) == ["run", "run", "recorded", "recorded", "recorded"]


def test_lengths_that_change_are_never_recorded(memory):
    one = captures()
    assert [called(one, steps, 2) for steps in range(50)] == [["run", "run"]] * 50


def test_the_oldest_recording_is_given_up_and_not_made_again_at_once(memory):
    one = captures()
    for steps in range(5):
        called(one, steps, 3)
    assert called(one, 4, 1) == ["recorded"]
    assert called(one, 0, 50) == ["run"] * 50
    assert called(one, 0, 60)[-1] == "recorded"


def test_recordings_hold_no_more_than_their_share_of_memory(memory, monkeypatch):
    monkeypatch.setattr(Stub, "size", 40)
    one = captures()
    for steps in range(3):
        called(one, steps, 3)
    assert called(one, 2, 1) == called(one, 1, 1) == ["recorded"]
    assert called(one, 0, 1) == ["run"]


def test_what_is_large_is_not_recorded_at_all(memory):
    one = captures()
    assert [one(7, [torch.zeros(100)])[0] for _ in range(5)] == ["run"] * 5


@pytest.mark.parametrize("error", [Untraceable("other numbers"), RuntimeError("no memory")], ids=str)
def test_a_recording_that_fails_or_gives_other_numbers_is_not_used(memory, error):
    def refuse(ours, theirs):
        raise error

    assert called(captures(refuse), 7, 6) == ["run"] * 6


# On a GPU


def recorded(cell):
    made = [entry.schedule.captures for entry in cell_known(cell).made.values()]  # one step is a schedule of its own
    return [sum(len(captures._known) for captures in column) for column in zip(*made, strict=True)]


@pytest.mark.cuda
def test_new_lengths_run_at_once():
    cell = PairCell().cuda()
    for steps in range(1, 31):
        hs.unroll(cell, torch.randn(3, steps, INPUT, device="cuda"), engine="fast")[0].sum().backward()
    assert recorded(cell) == [0, 0]


@pytest.mark.cuda
def test_a_recording_gives_the_same():
    cell, x = PairCell().cuda(), torch.randn(3, 7, INPUT, device="cuda", requires_grad=True)
    grads = []
    for _ in range(5):
        out = hs.unroll(cell, x, engine="fast")[0]
        grads.append([out, *torch.autograd.grad(out.cos().sum(), [x, *cell.parameters()])])
    assert recorded(cell) == [1, 1]
    torch.testing.assert_close(grads[0], grads[-1], rtol=1e-4, atol=1e-5)


@pytest.mark.cuda
def test_weights_that_change_between_replays_are_seen():
    cell, x = PairCell().cuda(), torch.randn(3, 7, INPUT, device="cuda")
    with torch.no_grad():
        for _ in range(5):
            hs.unroll(cell, x, engine="fast")
        cell.gates.weight.mul_(2)
        out = hs.unroll(cell, x, engine="fast")[0]
        torch.testing.assert_close(out, hs.unroll(cell, x, engine="loop")[0], rtol=1e-4, atol=1e-5)
