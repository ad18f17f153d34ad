"""A call is watched as the user makes it, once for all who want to know."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import hiddenstate as hs
from hiddenstate.cells import Layers, OuterCall, foreseen, layers, watched, when_reached
from hiddenstate.errors import CarryWarning, RecordingWarning


class Step(nn.Module):
    """A cell that bears none of the names of one."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(7, 4)

    def forward(self, signal: Tensor, past: Tensor | None = None) -> Tensor:
        past = signal.new_zeros(len(signal), 4) if past is None else past
        return torch.tanh(self.mix(torch.cat([signal, past], -1)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step, self.other, self.calls = Step(), Step(), 0

    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        self.calls += 1
        past, out = None, []
        for frame in x.unbind(1):
            past = (self.other if other else self.step)(frame, past)
            out.append(past)
        return torch.stack(out, 1)


def entry(model: nn.Module, *args: object) -> OuterCall:
    return OuterCall(model, args, {})


def test_all_who_want_to_know_are_told_of_one_call():
    model, x, told = Model(), torch.randn(2, 5, 3), []

    def inner() -> Tensor:
        return watched(entry(model, x), lambda: model.forward(x), told.append)

    out = watched(entry(model, x), inner, told.append)
    assert out.shape == (2, 5, 4)
    assert model.calls == 1
    first, second = told
    assert first is second
    assert [layer.name for layer in first] == ["step"]


def test_what_a_watched_call_made_is_there_with_its_graph_and_let_go_when_it_is_settled():
    model, x, told = Model(), torch.randn(2, 5, 3), []
    out = watched(entry(model, x), lambda: model.forward(x), told.append)
    found: Layers = told[0]
    (states,) = found.live(found[0]).values()
    assert all(state.requires_grad for state in states)
    torch.testing.assert_close(torch.stack(states, 1), out)
    assert not found.settled().live(found[0])


def test_an_exception_of_the_model_comes_out_as_it_is_and_nobody_is_told():
    model, told = Model(), []
    with pytest.raises(AttributeError):
        watched(entry(model, None), lambda: model.forward(None), told.append)
    assert told == []
    watched(entry(model, x := torch.randn(2, 5, 3)), lambda: model.forward(x), told.append)
    assert len(told) == 1


def test_a_call_of_our_own_ahead_tells_the_same_and_none_where_the_model_raises():
    model, x = Model(), torch.randn(2, 5, 3)
    found = foreseen(entry(model, x))
    assert found is not None
    assert [layer.name for layer in found] == ["step"]
    assert model.calls == 0
    assert foreseen(entry(model, None)) is None


def test_a_module_that_no_watched_call_reached_is_named_when_a_later_one_does():
    model, x, reached = Model(), torch.randn(2, 5, 3), []
    handles = when_reached(model, layers(model, x), reached.append)
    model(x)
    assert reached == []
    model(x, other=True)
    assert set(reached) == {"other"}
    for handle in handles:
        handle.remove()
    assert "forward" not in vars(model.other)


def test_a_recording_says_that_a_call_goes_where_none_went_and_records_the_next():
    model, x = Model(), torch.randn(2, 5, 3)
    with hs.record(model) as rec:
        model(x)
        with pytest.warns(RecordingWarning, match="other, which no call reached before"):
            model(x, other=True)
        out = model(x, other=True).detach()
    torch.testing.assert_close(rec["other"].h, out)


def test_a_carry_says_that_a_call_goes_where_none_went_and_carries_from_the_next():
    model, x = Model(), torch.randn(2, 12, 3)
    whole = model(x, other=True)
    with hs.Carry(model) as carry:
        model(x)
        with pytest.warns(CarryWarning, match="'other' may keep, which no call reached before"):
            model(x, other=True)
        carry.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CarryWarning)
            pieces = [model(piece, other=True) for piece in x.split(4, 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole)


def test_a_carried_cell_that_only_a_call_shows_goes_on_from_its_very_first_call():
    model, x = Model(), torch.randn(2, 12, 3)
    whole = model(x)
    with hs.Carry(model):
        pieces = [model(piece) for piece in x.split(4, 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    assert model.calls == 4


def test_a_carry_and_a_recording_of_the_same_model_watch_one_call():
    model, x = Model(), torch.randn(2, 12, 3)
    with hs.Carry(model), hs.record(model) as rec:
        outputs = [model(piece) for piece in x.split(4, 1)]
    assert model.calls == 3
    torch.testing.assert_close([run.h for run in rec.runs("step")], [out.detach() for out in outputs])


@pytest.mark.parametrize("detach", [True, False])
def test_what_the_first_call_leaves_holds_its_graph_where_that_is_asked_for(detach):
    model, x = Model(), torch.randn(2, 5, 3)
    with hs.Carry(model, detach=detach) as carry:
        model(x)
        (part,) = carry.state.values()
    assert part.requires_grad is not detach


class Held(NamedTuple):
    v: Tensor
    i: Tensor


class Spiking(nn.Module):
    """A cell that takes its state by name, as the container that it gives it back in."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(3, 4)

    def forward(self, x: Tensor, state: Held | None = None) -> tuple[Tensor, Held]:
        state = Held(x.new_zeros(len(x), 4), x.new_zeros(len(x), 4)) if state is None else state
        i = 0.8 * state.i + self.read(x)
        v = 0.9 * state.v + i
        return torch.tanh(v), Held(v, i)


class Driven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.neuron = Spiking()

    def forward(self, x: Tensor) -> Tensor:
        state, out = None, []
        for frame in x.unbind(1):
            y, state = self.neuron(frame, state)
            out.append(y)
        return torch.stack(out, 1)


def test_a_cell_gets_its_state_back_in_the_container_that_it_gave_from_the_second_call_on():
    model, x = Driven(), torch.randn(2, 12, 3)
    whole = model(x)
    with hs.Carry(model):
        pieces = [model(piece) for piece in x.split(4, 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
