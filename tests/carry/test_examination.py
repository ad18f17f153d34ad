"""What a call was too short to tell, and what pieces were not seen to give, is refused as often as it is tried."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hiddenstate as hs
from hiddenstate.errors import CarryError, CarryWarning

from .test_loops import Attentive, FeedingEachOther, Started, TwoStreams

X = torch.randn(3, 12, 3, generator=torch.Generator().manual_seed(0))


def elman() -> nn.Module:
    return Started(lambda _, x: x.new_zeros(len(x), 4))


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("make", [elman, Attentive, FeedingEachOther, TwoStreams])
@pytest.mark.filterwarnings("ignore::hiddenstate.errors.CarryWarning")
def test_a_first_call_that_is_too_short_is_refused_and_the_first_longer_one_is_carried(make, steps):
    model = make()
    whole = model(X)
    with hs.Carry(model, override=True):
        for _ in range(5):
            with pytest.raises(CarryError, match=r"too short to tell|was not seen"):
                model(X[:, :steps])
        torch.testing.assert_close(torch.cat([model(X[:, :5]), model(X[:, 5:])], 1), whole)


def test_without_override_a_call_that_is_too_short_is_said():
    model = elman()
    with (
        hs.Carry(model),
        pytest.warns(CarryWarning, match=r"not known to be carried: the model, .*only one repetition"),
    ):
        model(X[:, :1])


def test_what_longer_calls_have_told_is_not_asked_of_a_short_one(recwarn):
    model = elman()
    whole = model(X)
    with hs.Carry(model, override=True):
        out = torch.cat([model(piece) for piece in X.split([5, 5, 1, 1], 1)], 1)
    torch.testing.assert_close(out, whole)
    assert not recwarn


@pytest.mark.parametrize("steps", [1, 2])
def test_a_loaded_state_waits_for_a_call_that_shows_where_it_goes(steps):
    model, other = elman(), elman()
    other.load_state_dict(model.state_dict())
    whole = model(X)
    with hs.Carry(model, override=True) as carry:
        model(X[:, :6])
        saved = carry.state_dict()
    with hs.Carry(other, override=True) as carry:
        carry.load_state_dict(saved)
        for _ in range(5):
            with pytest.raises(CarryError, match=r"loaded has the layers loop\d+, which.*too short.*load it again"):
                other(X[:, 6 : 6 + steps])
        other(X[:, :4])
        carry.load_state_dict(saved)
        torch.testing.assert_close(other(X[:, 6 : 6 + steps]), whole[:, 6 : 6 + steps])


class InFront(nn.Module):
    """A convolution looks across the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.look, self.inner = nn.Conv1d(3, 3, 3, padding=1), elman()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.look(x.mT).mT)


def test_a_model_that_was_refused_is_refused_again():
    model = InFront()
    with hs.Carry(model, override=True):
        for _ in range(3):
            with pytest.raises(CarryError, match="looks across the cut"):
                model(X)


class Drawing(Attentive):
    """Noise in every step: pieces cannot be tried against the whole."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn(x.shape[:2])[..., None])


def test_where_nothing_can_be_tried_a_cell_whose_state_others_read_is_not_carried_alone():
    model = Drawing()
    with hs.Carry(model, override=True) as carry:
        with pytest.warns(CarryWarning, match="not proven: it draws random"):
            model(X)
        assert [name.split(".")[0].rstrip("0123456789") for name in carry.state] == ["loop"]


class StartsFromNone(nn.Module):
    """A cell that makes its own zeros where it is handed nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3 + 4, 4)

    def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        state = x.new_zeros(len(x), 4) if state is None else state
        return torch.tanh(self.mix(torch.cat([x, state], -1)))


class Run(nn.Module):
    """It runs a cell along time, from nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = StartsFromNone()

    def forward(self, x: Tensor) -> Tensor:
        h, out = None, []
        for frame in x.unbind(1):
            h = self.cell(frame, h)
            out.append(h)
        return torch.stack(out, 1)


class Layered(nn.Module):
    """A layer of torch's, and a loop of its own on what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.inner = nn.LSTM(3, 3, batch_first=True), elman()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.lstm(x)[0])


@pytest.mark.parametrize(("make", "override"), [(Run, True), (Run, False), (Layered, True), (Attentive, True)])
def test_it_goes_on_call_after_call(make, override):
    model = make()
    whole = model(X)
    with hs.Carry(model, override=override):
        out = torch.cat([model(piece) for piece in X.split([3, 2, 3, 1, 1, 2] if make is Run else [4, 3, 3, 2], 1)], 1)
    torch.testing.assert_close(out, whole)


class Neuron(nn.Module):
    """A voltage in an attribute."""

    voltage: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.voltage = 0.9 * (torch.zeros_like(x) if self.voltage is None else self.voltage) + x
        return torch.tanh(self.voltage)


class Clearing(nn.Module):
    """It clears its neuron at the start of every call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.neuron = nn.Linear(3, 4), Neuron()

    def forward(self, x: Tensor) -> Tensor:
        self.neuron.voltage = None
        return torch.stack([self.neuron(self.inner(frame)) for frame in x.unbind(1)], 1)


class ClearingTwo(Clearing):
    """And here there are two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Neuron()

    def forward(self, x: Tensor) -> Tensor:
        self.first.voltage = self.neuron.voltage = None
        return torch.stack([self.neuron(self.first(self.inner(frame))) for frame in x.unbind(1)], 1)


@pytest.mark.parametrize("steps", [1, 2, 12])
@pytest.mark.parametrize("kind", [Clearing, ClearingTwo])
def test_what_the_model_clears_in_every_call_is_not_said_to_be_carried(kind, steps):
    model = kind()
    with hs.Carry(model):
        model(X)
        with pytest.warns(CarryWarning, match=r"not carried: voltage of .*, which the model begins anew in every call"):
            model(X[:, :steps])


@pytest.mark.filterwarnings("ignore::hiddenstate.errors.CarryWarning")
@pytest.mark.parametrize("steps", [1, 2, 12])
@pytest.mark.parametrize("kind", [Clearing, ClearingTwo])
def test_and_with_override_it_is_refused(kind, steps):
    model = kind()
    with hs.Carry(model, override=True):
        model(X)
        with pytest.raises(CarryError, match=r"nothing of Clearing.* can be carried.*begins anew in every call: leave"):
            model(X[:, :steps])
