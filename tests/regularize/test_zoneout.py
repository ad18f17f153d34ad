import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.errors import BadInput, NotRecurrent
from hiddenstate.regularize import Zoneout
from tests.support.cells import CELLS, LayerNormLSTMCell, TanhCell

each_cell = pytest.mark.parametrize("sample", CELLS.values(), ids=CELLS)


def tensors(native):
    if isinstance(native, torch.Tensor):
        return [native]
    return [part for inner in (native.values() if isinstance(native, dict) else native) for part in tensors(inner)]


def prepared(sample, p):
    cell = sample.cell()
    zone, x = Zoneout(cell, p), sample.x(steps=1)[:, 0]
    state = zone.initial_state(3)
    return cell, zone, x, state


def state_of(cell, result, state):
    return hs.cells.as_layer(cell).split(result)[1] if len(tensors(result)) != len(tensors(state)) else result


@each_cell
def test_zero_is_the_cell_itself_and_one_stands_still(sample):
    cell, zone, x, state = prepared(sample, 0.0)
    for found, wanted in zip(tensors(zone(x, state)), tensors(cell(x, state)), strict=True):
        assert torch.equal(found, wanted)
    zone.p = 1.0
    for found, wanted in zip(tensors(state_of(cell, zone(x, state), state)), tensors(state), strict=True):
        assert torch.equal(found, wanted)


@each_cell
def test_in_training_each_unit_is_old_or_new(sample):
    cell, zone, x, state = prepared(sample, 0.5)
    new = tensors(state_of(cell, cell(x, state), state))
    for found, old, following in zip(tensors(state_of(cell, zone(x, state), state)), tensors(state), new, strict=True):
        assert ((found == old) | (found == following)).all()


@each_cell
def test_in_evaluation_each_unit_is_the_mean_of_both(sample):
    cell, zone, x, state = prepared(sample, 0.25)
    new = tensors(state_of(cell, cell(x, state), state))
    zone.eval()
    for found, old, following in zip(tensors(state_of(cell, zone(x, state), state)), tensors(state), new, strict=True):
        assert torch.allclose(found, 0.25 * old + 0.75 * following)


@each_cell
def test_it_is_a_cell_like_any_other(sample):
    zone, x = Zoneout(sample.cell(), 0.3).eval(), sample.x(batch=3, steps=5)
    (layer,) = hs.layers(nn.ModuleDict({"zone": zone}))
    assert layer.name == "zone"
    whole, _ = hs.unroll(zone, x)
    head, middle = hs.unroll(zone, x[:, :2])
    tail, _ = hs.unroll(zone, x[:, 2:], middle)
    assert torch.allclose(torch.cat([head, tail], dim=1), whole)


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_it_trains_through_unroll(kind):
    zone = Zoneout(kind(3, 4), 0.5)
    output, _ = hs.unroll(zone, torch.randn(2, 6, 3))
    output.sum().backward()
    assert all(weight.grad.isfinite().all() for weight in zone.parameters())
    again, _ = hs.unroll(zone, torch.randn(2, 6, 3))
    assert not torch.equal(output, again)


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_torchs_cells_start_from_zeros_when_no_state_is_given(kind):
    zone, x = Zoneout(kind(3, 4), 0.5).eval(), torch.randn(2, 3)
    for found, wanted in zip(tensors(zone(x)), tensors(zone(x, zone.initial_state(2))), strict=True):
        assert torch.equal(found, wanted)
    for found, wanted in zip(tensors(zone(x[0])), tensors(zone(x)), strict=True):
        assert torch.allclose(found, wanted[0], atol=1e-6)


def test_chance_is_about_p():
    zone = Zoneout(nn.GRUCell(3, 2000), 0.2)
    state = torch.randn(4, 2000)
    kept = (zone(torch.randn(4, 3), state) == state).float().mean()
    assert abs(kept.item() - 0.2) < 0.02


def test_each_part_may_have_its_own_chance():
    zone, state = Zoneout(nn.LSTMCell(3, 4), {"h": 0.0, "c": 1.0}), (torch.randn(2, 4), torch.randn(2, 4))
    h, c = zone(torch.randn(2, 3), state)
    assert torch.equal(c, state[1])
    assert (h != state[0]).all()
    with pytest.raises(BadInput, match="p is given for h, but the state has a part 'c'"):
        Zoneout(nn.LSTMCell(3, 4), {"h": 0.5})(torch.randn(2, 3), state)


def test_an_output_that_is_the_state_stays_the_state():
    zone = Zoneout(LayerNormLSTMCell(3, 4), 0.5)
    output, (h, _) = zone(torch.randn(2, 3), (torch.randn(2, 4), torch.randn(2, 4)))
    assert output is h


def test_gradient_goes_to_the_old_state_where_it_was_kept():
    zone, old = Zoneout(TanhCell(3, 4), 1.0), torch.randn(2, 4, requires_grad=True)
    zone(torch.randn(2, 3), old).sum().backward()
    assert (old.grad == 1).all()


def test_it_has_the_cells_size_and_shows_its_chance():
    zone = Zoneout(nn.GRUCell(3, 4), 0.1)
    assert (zone.input_size, zone.hidden_size) == (3, 4)
    assert "p=0.1" in repr(zone)


def test_a_cell_without_a_size_has_none():
    class Sizeless(nn.Module):
        def initial_state(self, batch):
            return torch.zeros(batch, 2)

        def forward(self, x, state):
            return state + x

    zone = Zoneout(Sizeless(), 0.1)
    assert not hasattr(zone, "hidden_size")
    assert not hasattr(zone, "input_size")
    assert torch.equal(zone.eval()(torch.ones(1, 2), zone.initial_state(1)), torch.full((1, 2), 0.9))


def test_what_runs_whole_sequences_is_refused():
    with pytest.raises(NotRecurrent, match=r"LSTM runs whole sequences.*nn.LSTMCell, with hs.unroll"):
        Zoneout(nn.LSTM(3, 4), 0.1)
    with pytest.raises(NotRecurrent, match="Linear is no recurrent layer or cell"):
        Zoneout(nn.Linear(3, 4), 0.1)


def test_a_cell_that_changes_the_form_of_its_state_is_refused():
    class Changing(nn.Module):
        hidden_size = 2

        def forward(self, x, state):
            return {"h": state}

    with pytest.raises(NotRecurrent, match="Changing returned neither a state nested like the one it was given"):
        Zoneout(Changing(), 0.1)(torch.ones(1, 2), torch.zeros(1, 2))


@pytest.mark.parametrize("p", [-1, 1.1, {"h": 2}])
def test_what_is_no_probability_is_refused(p):
    with pytest.raises(BadInput, match="p is a probability from 0 to 1"):
        Zoneout(nn.GRUCell(3, 4), p)
