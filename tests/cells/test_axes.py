"""Where the rows and the steps of an input are: models in many styles, each in both layouts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hiddenstate as hs
from hiddenstate.cells import cell_along, input_axes, is_step
from hiddenstate.errors import BadInput


class Fused(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, 6, num_layers=2, batch_first=batch_first, dropout=0.5)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class Turned(Fused):
    """Takes the one layout, though its layer takes the other."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__(not batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.transpose(0, 1))[0]).transpose(0, 1)


class LastOnly(Fused):
    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(x)
        return self.head(out[:, -1] if self.rnn.batch_first else out[-1])


class Stepping(nn.Module):
    """Steps a cell of torch's in a loop."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.axis, self.cell = int(batch_first), nn.GRUCell(3, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1 - self.axis], 6)
        states = []
        for step in x.unbind(self.axis):
            h = self.cell(step, h)
            states.append(h)
        return torch.stack(states, self.axis)


class ByHand(Stepping):
    """A loop that no module tells of."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__(batch_first)
        del self.cell
        self.w, self.u = nn.Linear(3, 6), nn.Linear(6, 6)

    def cell(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.w(x) + self.u(h))


class Words(nn.Module):
    """Tokens in, and characters of words within: a layer has rows of its own."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(11, 3), nn.GRU(3, 3, batch_first=True)
        self.outer = nn.GRU(3, 6, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        e = self.embedding(x)
        inner = self.inner(e.reshape(-1, 1, 3))[0].reshape(e.shape)
        return self.outer(inner)[0]


STYLES = [Fused, Turned, LastOnly, Stepping, ByHand, Words]


def made(style: type[nn.Module], batch_first: bool, rows: int, steps: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(rows * 31 + steps)
    x = torch.randint(11, (rows, steps)) if style is Words else torch.randn(rows, steps, 3)
    return style(batch_first), x if batch_first else x.transpose(0, 1)


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=15, deadline=None)
@given(batch_first=st.booleans(), rows=st.integers(2, 9), steps=st.integers(2, 12))
def test_the_axes_of_a_model_are_found_whatever_its_style_and_however_many_rows_and_steps(
    style: type[nn.Module], batch_first: bool, rows: int, steps: int
) -> None:
    model, x = made(style, batch_first, rows, steps)
    found = input_axes(model, x)
    assert (found.time, found.batch, found.sure) == (int(batch_first), int(not batch_first), True)
    assert torch.equal(found.as_given(found.rows_first(x)), x)
    assert found.rows_first(x).shape[:2] == (rows, steps)


@pytest.mark.parametrize("style", STYLES)
def test_looking_leaves_model_modes_and_random_stream_as_they_were(style: type[nn.Module]) -> None:
    model, x = made(style, False, 4, 6)
    model.train()
    before, stream = {n: p.clone() for n, p in model.state_dict().items()}, torch.get_rng_state()
    input_axes(model, x)
    assert model.training
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or "forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_layer_says_it_by_its_batch_first(kind: type[nn.RNNBase]) -> None:
    assert input_axes(kind(3, 4), torch.randn(5, 5, 3)).time == 0  # type: ignore[call-arg]
    assert input_axes(kind(3, 4, batch_first=True), torch.randn(5, 5, 3)).time == 1  # type: ignore[call-arg]
    assert "batch_first=False" in str(input_axes(kind(3, 4), torch.randn(5, 5, 3)))  # type: ignore[call-arg]


@pytest.mark.parametrize("batch_first", [True, False])
def test_one_sequence_has_no_rows(batch_first: bool) -> None:
    for model in (nn.GRU(3, 4, batch_first=batch_first), Fused(batch_first)):
        found = input_axes(model, torch.randn(9, 3))
        assert (found.time, found.batch) == (0, None)
        assert found.rows_first(torch.randn(9, 3)).shape == (1, 9, 3)
    assert input_axes(Words(True), torch.arange(9)).batch is None


def test_what_is_told_holds_and_the_other_axis_follows() -> None:
    x = torch.randn(4, 9, 3)
    for told, expected in (
        ({"time_axis": 0}, (0, 1)),
        ({"time_axis": 1}, (1, 0)),
        ({"batch_axis": 1}, (0, 1)),
        ({"batch_axis": 0}, (1, 0)),
        ({"time_axis": -1}, (2, 0)),
        ({"time_axis": 2, "batch_axis": 1}, (2, 1)),
    ):
        found = input_axes(nn.GRU(3, 4, batch_first=True), x, **told)
        assert (found.time, found.batch) == expected


def test_axes_that_cannot_be_are_refused() -> None:
    x, gru = torch.randn(4, 9, 3), nn.GRU(3, 4)
    with pytest.raises(BadInput, match=r"time_axis is 3, but the input has shape \(4, 9, 3\): it has no such axis"):
        input_axes(gru, x, time_axis=3)
    with pytest.raises(BadInput, match="time_axis and batch_axis are both 1, but steps and rows lie on axes of their"):
        input_axes(gru, x, time_axis=1, batch_axis=-2)


class OfOneSize(Fused):
    """Takes no piece: its first state is made for so many rows."""

    def forward(self, x: Tensor) -> Tensor:
        zeros = torch.zeros(2, 4, 6)
        return self.head(self.rnn(x, (zeros, zeros))[0])


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_model_that_takes_no_piece_is_tried_on_the_whole(batch_first: bool) -> None:
    x = torch.randn(4, 30, 3)
    assert input_axes(OfOneSize(batch_first), x if batch_first else x.transpose(0, 1)).time == int(batch_first)


class Broken(Fused):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("no")


def test_where_nothing_tells_the_layers_setting_is_assumed_and_that_is_said() -> None:
    found = input_axes(Broken(False), torch.randn(4, 9, 3))
    assert (found.time, found.sure) == (0, False)
    assert "assumed, since rnn has batch_first=False; time_axis= says otherwise" in found.noted
    assert "assumed, since nothing tells" in str(input_axes(nn.Linear(3, 3), torch.randn(4, 9, 3)))
    assert input_axes(Fused(True), torch.randn(4, 9, 3)).noted == ""


class Halved(nn.Module):
    """Two steps become one before the layer."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first, self.rnn = batch_first, nn.GRU(6, 4, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        x = x[:, : x.shape[1] // 2 * 2].reshape(x.shape[0], -1, 6)
        return self.rnn(x if self.batch_first else x.transpose(0, 1))[0]


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_layer_that_sees_fewer_steps_than_the_input_has_tells_all_the_same(batch_first: bool) -> None:
    x = torch.randn(4, 9, 3)
    assert input_axes(Halved(batch_first), x if batch_first else x.transpose(0, 1)).time == int(batch_first)


class Convolved(nn.Module):
    """Takes (batch, feature, time), as convolutions do."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.rnn = nn.Conv1d(3, 6, 3, padding=1), nn.GRU(6, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(self.front(x).transpose(1, 2))[0]


def test_features_are_not_taken_for_steps() -> None:
    found = input_axes(Convolved(), torch.randn(4, 3, 9))
    assert (found.time, found.batch) == (2, 0)
    assert not input_axes(Convolved(), torch.randn(4, 3, 3)).sure


class Around(nn.Module):
    """A cell around a cell, whose arguments say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTMCell(3, 5)

    def forward(self, now, st):
        h, c = self.inner(now, st)
        return 0.1 * st[0] + 0.9 * h, c


class AlongItself(nn.Module):
    """A model that insists on a state, and steps its cell itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRUCell(3, 5)

    def forward(self, x, h):
        for step in x.unbind(1):
            h = self.inner(step, h)
        return h


def test_a_cell_around_a_cell_is_one_step_and_a_model_that_steps_its_cell_is_none():
    x = torch.randn(4, 7, 3)
    around = Around()
    assert is_step(around, x)
    assert (found := cell_along(around, x)) is not None
    assert found.module is around
    assert not is_step(AlongItself(), x)
    assert cell_along(AlongItself(), x) is None
    assert hs.check_split(Around(), x)
