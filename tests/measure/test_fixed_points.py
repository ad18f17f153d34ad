from importlib import import_module

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.errors import BadInput, NotRecurrent
from tests.support.cells import CELLS
from tests.support.dynamics import LinearNet, doubling, flip_flop
from tests.support.untouched import untouched

module = import_module("hiddenstate.measure.fixed_points")  # the function has the name of its file


class Doubling(nn.Module):
    """tanh(2 h) as a cell that nobody has seen."""

    def __init__(self, units):
        super().__init__()
        self.hidden_size, self.input_size = units, 1

    def forward(self, x, state):
        return torch.tanh(2 * state)


@pytest.mark.parametrize("make", [doubling, Doubling])
def test_one_unit_has_three(make):
    found = hs.measure.fixed_points(make(1))
    assert sorted(found.points.flatten().tolist()) == pytest.approx([-0.957504, 0, 0.957504], abs=1e-5)
    assert found.stable.tolist() == [True, True, False]
    assert found.eigenvalues.real.flatten().tolist() == pytest.approx([0.166372, 0.166372, 2], abs=1e-4)
    assert (found.residuals <= found.tolerance).all()
    assert found.hits.sum() <= 1024


@pytest.mark.parametrize("make", [doubling, Doubling])
def test_three_units_have_27_of_which_8_are_stable(make):
    found = hs.measure.fixed_points(make(3))
    assert len(found.points) == 27
    assert int(found.stable.sum()) == 8
    assert found.unstable_directions.bincount().tolist() == [8, 12, 6, 1]
    levels = found.points.double() / 0.957504
    torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-4)
    assert str(found).startswith("27 fixed points, 8 of them stable, from 1024 starts (‖F(s) - s‖ ≤ 1e-")
    assert str(found).endswith("… and 17 more")


@pytest.mark.slow
def test_a_trained_flip_flop_remembers_each_of_eight_states():
    net = flip_flop(bits=3)
    with untouched(net):
        found = hs.measure.fixed_points(net)
    assert int(found.stable.sum()) == 8
    held = found.points[found.stable]  # (8, unit)
    later = net(torch.zeros(8, 500, 3), held.unsqueeze(0))[0][:, -1]
    torch.testing.assert_close(later, held, rtol=0, atol=1e-4)


def test_a_linear_net_has_one_and_it_is_where_algebra_says():
    w, v = torch.randn(5, 5, dtype=torch.float64) / 4, torch.randn(5, 2, dtype=torch.float64)
    x = torch.tensor([1.0, -2.0], dtype=torch.float64)
    found = hs.measure.fixed_points(LinearNet(w, v), x, starts=32)
    expected = torch.linalg.solve(torch.eye(5, dtype=torch.float64) - w, v @ x)
    torch.testing.assert_close(found.points, expected.unsqueeze(0))
    torch.testing.assert_close(
        found.eigenvalues.abs(), torch.linalg.eigvals(w).abs().sort(descending=True).values.unsqueeze(0)
    )


@pytest.mark.parametrize("sample", CELLS.values(), ids=CELLS)
def test_each_point_of_any_cell_leads_to_itself(sample):
    cell, x = sample.cell(), sample.x(batch=1, steps=1)[0, 0]
    with untouched(cell):
        found = hs.measure.fixed_points(cell, x, starts=64)
    system = hs.measure.fixed_points.__globals__["as_system"](cell)
    for point in found.points.double():
        after = system.step(x.reshape(1, *x.shape), point.unsqueeze(0))
        torch.testing.assert_close(after[0], point, rtol=0, atol=1e-7)
    distances = torch.cdist(found.points, found.points, p=float("inf")) + torch.eye(len(found.points))
    assert (distances > 1e-3).all()


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_stable_points_are_where_the_layer_itself_ends(kind):
    layer = kind(2, 3, num_layers=2)
    x = torch.tensor([0.5, -1.0])
    found = hs.measure.fixed_points(layer, x, starts=50)
    output = layer(x.expand(300, 1, 2))[0][-1, 0]  # h of the upper layer
    near = (found.points[found.stable][:, 3:6] - output.detach()).abs().amax(1)
    assert float(near.min()) < 1e-4


def test_starts_may_be_given():
    found = hs.measure.fixed_points(doubling(1), states=torch.tensor([[0.5], [0.6], [1.0]]))
    assert found.points.flatten().tolist() == pytest.approx([0.957504], abs=1e-5)
    assert (found.starts, found.hits.tolist()) == (3, [3])


def test_states_of_a_run_may_be_given_as_they_are():
    layer = nn.GRU(2, 3)
    walk = hs.measure.jacobians(layer, torch.randn(2, 5, 2)).states
    assert len(hs.measure.fixed_points(layer, states=walk).points) >= 1


def test_the_same_seed_gives_the_same_points():
    layer = nn.GRU(2, 6)
    one, other = (hs.measure.fixed_points(layer, starts=20, seed=3) for _ in range(2))
    assert torch.equal(one.points, other.points)


def test_a_constant_sequence_is_one_input():
    layer = nn.GRU(2, 3)
    one = hs.measure.fixed_points(layer, torch.ones(2), starts=10).points
    assert torch.equal(hs.measure.fixed_points(layer, torch.ones(1, 7, 2), starts=10).points, one)


def test_no_point_is_an_answer_too():
    class Counter(nn.Module):
        hidden_size = input_size = 1

        def forward(self, x, state):
            return state + 1

    found = hs.measure.fixed_points(Counter(), starts=10)
    assert found.points.shape == (0, 1)
    assert found.eigenvalues.shape == (0, 1)
    assert str(found).startswith("0 fixed points, 0 of them stable")


def test_interrupting_keeps_what_has_arrived(monkeypatch):
    def tracked(items, label, total):
        for number, item in enumerate(items):
            yield item
            if number == 6:
                raise KeyboardInterrupt

    monkeypatch.setattr(module, "tracked", tracked)
    layer = doubling(3)
    with untouched(layer):
        found = hs.measure.fixed_points(layer)
    assert found.interrupted
    assert 0 < len(found.points) <= 27
    assert (found.residuals <= found.tolerance).all()
    assert "interrupted" in str(found)


def test_the_layer_comes_back_untouched():
    layer = nn.LSTM(2, 3, num_layers=2, dropout=0.5)
    with untouched(layer):
        hs.measure.fixed_points(layer, starts=10)
    with untouched(layer), pytest.raises(BadInput):
        hs.measure.fixed_points(layer, torch.zeros(5), starts=10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"starts": 0}, "0 starts are asked for"),
        ({"x": torch.zeros(3)}, "x has 3 features, but this GRU takes 2"),
        ({"x": torch.randn(1, 5, 2)}, "a constant input, but x has 5 steps that differ.*states="),
        ({"states": torch.zeros(4, 7)}, r"states have shape \(4, 7\), but \(n, 3\) is needed"),
        ({"states": torch.zeros(0, 3)}, r"\(n, 3\) is needed"),
    ],
)
def test_what_cannot_be_searched_is_refused(options, message):
    with pytest.raises(BadInput, match=message):
        hs.measure.fixed_points(nn.GRU(2, 3), **options)


def test_an_input_of_unknown_width_has_to_be_given():
    class Cell(nn.Module):
        hidden_size = 2

        def forward(self, x, state):
            return state / 2 + x

    with pytest.raises(BadInput, match=r"how many features Cell takes is unknown: give x"):
        hs.measure.fixed_points(Cell())
    assert hs.measure.fixed_points(Cell(), torch.ones(2), starts=5).points.tolist() == [[2, 2]]


def test_both_directions_are_refused():
    with pytest.raises(NotRecurrent, match="bidirectional"):
        hs.measure.fixed_points(nn.GRU(2, 3, bidirectional=True))


@pytest.mark.cuda
def test_on_cuda_the_points_are_the_same():
    layer = doubling(3)
    assert len(hs.measure.fixed_points(layer.cuda()).points) == 27
