"""Torch's own layers as systems: what the closed forms say is what autograd says of the layer."""

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.cells import as_layer
from hiddenstate.errors import NotRecurrent
from hiddenstate.measure.system import System
from hiddenstate.measure.torch_system import TorchSystem, as_system

LAYERS = {
    "rnn": lambda **o: nn.RNN(3, 4, **o),
    "relu": lambda **o: nn.RNN(3, 4, nonlinearity="relu", **o),
    "gru": lambda **o: nn.GRU(3, 4, **o),
    "lstm": lambda **o: nn.LSTM(3, 4, **o),
    "projected lstm": lambda **o: nn.LSTM(3, 4, proj_size=2, **o),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("kind", LAYERS)
def test_closed_forms_equal_autograd_on_the_layer_itself(kind, depth, bias):
    layer = LAYERS[kind](num_layers=depth, bias=bias, dtype=torch.float64)
    closed, plain = as_system(layer), System(as_layer(layer))
    assert isinstance(closed, TorchSystem)
    x = torch.randn(2, 6, 3, dtype=torch.float64)
    states = closed.walk(x)
    torch.testing.assert_close(states, plain.walk(x))
    inputs, states = x.flatten(0, 1), states.flatten(0, 1)
    torch.testing.assert_close(closed.step(inputs, states), plain.step(inputs, states))
    torch.testing.assert_close(closed.jacobians(inputs, states), plain.jacobians(inputs, states))


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("kind", LAYERS)
def test_derivatives_by_state_and_input_stand_side_by_side(kind, depth):
    system = as_system(LAYERS[kind](num_layers=depth, dtype=torch.float64))
    x, state = torch.randn(1, 3, dtype=torch.float64), torch.randn(1, system.size, dtype=torch.float64)
    by_state, by_input = torch.autograd.functional.jacobian(lambda s, x: system.step(x, s)[0], (state, x))
    expected = torch.cat([by_state[:, 0], by_input[:, 0]], dim=1)
    torch.testing.assert_close(system.whole_jacobians(x, state)[0], expected)


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_torchs_cells_have_closed_forms_too(kind):
    cell = kind(3, 4, dtype=torch.float64)
    closed, plain = as_system(cell), System(as_layer(cell))
    assert isinstance(closed, TorchSystem)
    x, states = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, closed.size, dtype=torch.float64)
    torch.testing.assert_close(closed.step(x, states), plain.step(x, states))
    torch.testing.assert_close(closed.jacobians(x, states), plain.jacobians(x, states))


def test_in_double_the_same_weights_are_kept_and_the_layer_is_not():
    layer = nn.GRU(3, 4, num_layers=2)
    system, x = as_system(layer), torch.randn(2, 5, 3)
    double = system.in_double()
    states = double.walk(x.double())
    assert states.dtype == torch.float64
    assert layer.weight_hh_l0.dtype == system.dtype == torch.float32
    torch.testing.assert_close(states.float(), system.walk(x))


def test_a_layer_in_training_is_taken_as_in_eval_mode():
    layer = nn.LSTM(3, 4, num_layers=2, dropout=0.9)
    x = torch.randn(2, 5, 3)
    torch.testing.assert_close(as_system(layer.train()).walk(x), as_system(layer.eval()).walk(x))


def test_a_stack_of_any_cells_equals_torchs_own_stack():
    lstm = nn.LSTM(3, 4, num_layers=2, dtype=torch.float64)
    stack = hs.Recurrent(nn.LSTMCell, 3, 4, num_layers=2).double()
    with torch.no_grad():
        for depth in range(2):
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                getattr(getattr(stack, f"l{depth}"), name).copy_(getattr(lstm, f"{name}_l{depth}"))
    one, other = as_system(lstm), as_system(stack)
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    states = one.walk(x)
    torch.testing.assert_close(other.walk(x), states)
    torch.testing.assert_close(
        other.jacobians(x.flatten(0, 1), states.flatten(0, 1)), one.jacobians(x.flatten(0, 1), states.flatten(0, 1))
    )


def test_the_order_is_h_of_all_layers_then_c_of_all_layers():
    layer = nn.LSTM(3, 2, num_layers=2)
    h, c = torch.arange(4.0).reshape(2, 1, 2), torch.arange(4.0, 8.0).reshape(2, 1, 2)
    assert as_system(layer).start((h, c), 1).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_a_subclass_that_does_otherwise_is_not_taken_for_torchs_own():
    class Twice(nn.GRU):
        def forward(self, x, hx=None):
            output, state = super().forward(x, hx)
            return output, 2 * state

    layer = Twice(1, 2)
    nn.init.zeros_(layer.weight_hh_l0)
    nn.init.zeros_(layer.weight_ih_l0)
    with torch.no_grad():
        layer.bias_ih_l0.zero_()
        layer.bias_hh_l0.zero_()
    torch.testing.assert_close(hs.measure.jacobians(layer, torch.zeros(1, 1, 1)).values[0, 0], torch.eye(2))


def test_a_layer_of_both_directions_is_refused():
    with pytest.raises(NotRecurrent, match="this GRU is bidirectional: it reads the future too"):
        as_system(nn.GRU(3, 4, bidirectional=True))


def test_of_a_model_the_layer_in_it_is_asked_for_by_name():
    model = nn.Sequential(nn.Linear(2, 3), nn.GRU(3, 4))
    with pytest.raises(
        NotRecurrent, match=r"this Sequential is a model around 1: give that layer, and as x what it is"
    ):
        hs.measure.jacobians(model, torch.randn(2, 5, 2))


def test_what_is_not_recurrent_is_refused():
    thing = nn.Linear(3, 4)
    with pytest.raises(NotRecurrent, match="is no recurrent layer or cell"):
        as_system(thing)


def test_what_is_no_module_is_refused():
    with pytest.raises(NotRecurrent, match="a recurrent layer, but this is str"):
        as_system("lstm")
