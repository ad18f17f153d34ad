import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.errors import BadInput, NotRecurrent
from tests.support.cells import CELLS
from tests.support.dynamics import LinearNet, zeroed
from tests.support.untouched import untouched


class Turning(nn.Module):
    """A state that goes round a circle for ever."""

    input_size = 1

    def initial_state(self, batch):
        return torch.tensor([[1.0, 0.0]]).repeat(batch, 1)

    def forward(self, x, state):
        angle = torch.tensor(0.7)
        turn = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
        return state @ turn.T


def counter(units=2):
    """h' = h + x: under a constant input it counts."""
    return LinearNet(torch.eye(units), torch.ones(units, 1))


@pytest.mark.parametrize(
    "make", [lambda: nn.LSTM(3, 4, num_layers=2, batch_first=True), lambda: nn.GRU(3, 4, batch_first=True)]
)
def test_distances_are_those_between_states_and_a_metric(make):
    layer = make()
    x = torch.randn(3, 1, 3).expand(3, 12, 3)
    found = hs.measure.positions(layer, x)
    states = hs.measure.jacobians(layer, x).states
    expected = torch.cdist(states, states).mean(0)
    torch.testing.assert_close(found.distances, expected.double(), rtol=1e-4, atol=1e-4)
    assert torch.equal(found.distances, found.distances.T)
    assert not found.distances.diagonal().any()
    assert found.distances.shape == (12, 12)


def test_a_counter_knows_where_it_is_and_never_settles():
    found = hs.measure.positions(counter(), steps=30)
    assert found.decodability == pytest.approx(1, abs=1e-6)
    assert found.settles_at is None
    torch.testing.assert_close(found.moves, torch.full((30,), 2**0.5, dtype=torch.float64))
    assert "never settles" in str(found)


def test_a_layer_without_weights_knows_nothing_and_never_moves():
    found = hs.measure.positions(zeroed(nn.RNN(2, 3, batch_first=True)))
    assert (found.decodability, found.settles_at) == (0, 0)
    assert found.distances.shape == (50, 50)
    assert not found.distances.any()


def test_a_circle_never_settles_and_does_not_tell_its_round():
    found = hs.measure.positions(Turning(), steps=100)
    assert found.settles_at is None
    assert found.decodability < 0.1


@pytest.mark.parametrize(("rate", "expected"), [(0.5, 7), (0.9, 44)])
def test_an_exponential_settles_when_its_moves_are_small(rate, expected):
    found = hs.measure.positions(LinearNet(torch.full((1, 1), rate), torch.ones(1, 1)), steps=100)
    assert found.settles_at == expected  # the first power of the rate at or below 1 %
    assert f"settles at step {expected} (moves within 0.01 of the largest)" in str(found)


def test_the_tolerance_counts():
    net = LinearNet(torch.full((1, 1), 0.5), torch.ones(1, 1))
    assert hs.measure.positions(net, tolerance=0.1).settles_at == 4


def test_one_input_is_given_at_every_step():
    layer, x = nn.GRU(3, 4, batch_first=True), torch.randn(3)
    one = hs.measure.positions(layer, x, steps=7)
    torch.testing.assert_close(one.distances, hs.measure.positions(layer, x.expand(1, 7, 3)).distances)


def test_without_an_input_it_is_one_all_along():
    layer = nn.GRU(3, 4, batch_first=True)
    torch.testing.assert_close(
        hs.measure.positions(layer).distances, hs.measure.positions(layer, torch.ones(1, 50, 3)).distances
    )


@pytest.mark.parametrize("sample", CELLS.values(), ids=CELLS)
def test_any_cell_can_be_measured_and_comes_back_untouched(sample):
    cell, x = sample.cell(), sample.x(batch=2, steps=1).expand(2, 10, *([3] if not sample.tokens else []))
    with untouched(cell):
        found = hs.measure.positions(cell, x)
    assert 0 <= found.decodability <= 1
    assert found.distances.isfinite().all()


def test_a_given_state_is_where_it_starts():
    found = hs.measure.positions(counter(1), steps=3, state=torch.tensor([[5.0]]))
    assert found.moves.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.zeros(3), {"steps": 1}, "1 steps are asked for, but positions are told apart from 2 on"),
        (torch.zeros(2, 1, 3), {}, "x has 1 steps, but 2 or more"),
        (torch.zeros(0, 5, 3), {}, "no rows"),
        (torch.full((3,), float("nan")), {}, "nan at step 0 of row 0"),
        (torch.zeros(4), {}, "takes 3 features"),
    ],
)
def test_what_cannot_be_measured_is_refused(x, options, message):
    with pytest.raises(BadInput, match=message):
        hs.measure.positions(nn.GRU(3, 4, batch_first=True), x, **options)


def test_an_input_of_unknown_width_has_to_be_given():
    class Cell(nn.Module):
        hidden_size = 2

        def forward(self, x, state):
            return state / 2 + x

    with pytest.raises(BadInput, match="how many features Cell takes is unknown"):
        hs.measure.positions(Cell())


def test_both_directions_are_refused():
    with pytest.raises(NotRecurrent, match="bidirectional"):
        hs.measure.positions(nn.GRU(2, 3, bidirectional=True, batch_first=True))


@pytest.mark.parametrize("measure", ["positions", "jacobians", "lyapunov", "contributions"])
@pytest.mark.parametrize(
    "make", [lambda: nn.GRU(3, 6), lambda: nn.LSTM(3, 6, 2, batch_first=True), lambda: nn.RNN(3, 6)]
)
def test_a_layer_takes_one_sequence_without_rows_as_torch_does(measure, make):
    layer, x = make(), torch.randn(20, 3)
    found = getattr(hs.measure, measure)(layer, x)
    batched = getattr(hs.measure, measure)(layer, x.unsqueeze(0 if layer.batch_first else 1))
    assert str(found) == str(batched)


@pytest.mark.parametrize("measure", ["positions", "jacobians", "lyapunov", "contributions", "memory"])
def test_a_cell_says_which_axis_is_missing(measure):
    with pytest.raises(BadInput, match=r"this is \(20, 3\). One sequence \(time, feature\) wants x.unsqueeze\(0\)"):
        getattr(hs.measure, measure)(nn.GRUCell(3, 6), torch.randn(20, 3))
