import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.cells import as_layer
from hiddenstate.errors import BadInput, NotRecurrent, StateMismatch
from hiddenstate.measure.system import System, check_sequence
from hiddenstate.measure.torch_system import TorchSystem, as_system
from tests.support.cells import CELLS

LAYERS = {
    "rnn": lambda **o: nn.RNN(3, 4, **o),
    "relu": lambda **o: nn.RNN(3, 4, nonlinearity="relu", **o),
    "gru": lambda **o: nn.GRU(3, 4, **o),
    "lstm": lambda **o: nn.LSTM(3, 4, **o),
    "projected lstm": lambda **o: nn.LSTM(3, 4, proj_size=2, **o),
}


def oracle(system, x, vector):
    """One row, one step, torch's own Jacobian."""
    return torch.autograd.functional.jacobian(lambda s: system.step(x.unsqueeze(0), s.unsqueeze(0))[0], vector)


@pytest.mark.parametrize("sample", CELLS.values(), ids=CELLS)
def test_packing_and_unpacking_a_state_is_the_identity(sample):
    system = System(as_layer(sample.cell(), sample.x()[:, 0]))
    vectors = torch.randn(5, system.size, dtype=torch.float64)
    assert torch.equal(system.pack(system.unpack(vectors)), vectors)
    assert system.unpack(vectors).batch == 5


@pytest.mark.parametrize("sample", CELLS.values(), ids=CELLS)
def test_a_walk_ends_where_unrolling_does(sample):
    cell, x = sample.cell(), sample.x(batch=3, steps=5)
    system = as_system(cell, x)
    _, final = hs.unroll(cell, x, engine="loop")
    torch.testing.assert_close(system.walk(x)[:, -1], system.pack(final))


@pytest.mark.parametrize("sample", CELLS.values(), ids=CELLS)
def test_derivatives_of_any_cell_are_autograds(sample):
    cell, x = sample.cell(), sample.x(batch=3, steps=2)
    system = as_system(cell, x)
    states = system.walk(x)[:, 0]
    found = system.jacobians(x[:, 1], states)
    expected = torch.stack([oracle(system, x[row, 1], states[row]) for row in range(3)])
    torch.testing.assert_close(found, expected)
    directions = torch.randn(3, system.size, 2, dtype=torch.float64)
    following, pushed = system.tangents(x[:, 1], states, directions)
    torch.testing.assert_close(pushed, found @ directions)
    torch.testing.assert_close(following, system.step(x[:, 1], states))


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


def test_h_and_c_come_first_whatever_the_cell_calls_first():
    class Backwards(nn.Module):
        input_size = 1

        def initial_state(self, batch):
            return {"slow": torch.full((batch, 1), 3.0), "c": torch.full((batch, 1), 2.0), "h": torch.ones(batch, 1)}

        def forward(self, x, state):
            return dict(state)

    assert as_system(Backwards()).initial(1).tolist() == [[1, 2, 3]]


def test_whole_numbers_are_carried_but_are_no_coordinates():
    class Counting(nn.Module):
        input_size = 1

        def initial_state(self, batch):
            return {"h": torch.ones(batch, 2), "count": torch.zeros(batch, 1, dtype=torch.int64)}

        def forward(self, x, state):
            assert state["count"].dtype == torch.int64
            return {"h": state["h"] * torch.where(state["count"] > 0, 0.5, 2.0), "count": state["count"] + 1}

    system = as_system(Counting())
    x = torch.zeros(1, 3, 1)
    assert system.size == 2
    assert system.walk(x)[0, :, :2].tolist() == [[2, 2], [1, 1], [0.5, 0.5]]
    found = hs.measure.jacobians(Counting(), x).values
    assert found[0, :, 0].tolist() == [[2, 0], [0.5, 0], [0.5, 0]]


def test_complex_states_have_two_coordinates_each():
    class Turning(nn.Module):
        input_size = 1

        def initial_state(self, batch):
            return torch.ones(batch, 1, dtype=torch.complex64)

        def forward(self, x, state):
            return state * 1j + x

    found = hs.measure.jacobians(Turning(), torch.zeros(1, 2, 1))
    assert found.values[0, 0].tolist() == [[0, -1], [1, 0]]


def test_a_cell_without_weights_is_as_exact_as_its_input():
    class Half(nn.Module):
        input_size = hidden_size = 1

        def forward(self, x, state):
            return state / 2 + x

    x = torch.zeros(1, 2, 1, dtype=torch.float64)
    assert as_system(Half(), x).walk(x).dtype == torch.float64


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


def test_a_step_without_a_forward_derivative_falls_back():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, s):
            ctx.save_for_backward(s)
            return s * s

        @staticmethod
        def backward(ctx, g):
            return 2 * ctx.saved_tensors[0] * g

    class Cell(nn.Module):
        input_size = hidden_size = 2

        def forward(self, x, state):
            return Square.apply(state) + x

    system = as_system(Cell(), torch.zeros(1, 1, 2))
    following, pushed = system.tangents(torch.zeros(1, 2), torch.tensor([[1.0, 2.0]]), torch.eye(2).unsqueeze(0))
    assert following.tolist() == [[1, 4]]
    assert pushed.tolist() == [[[2, 0], [0, 4]]]


# --- what is no system ---


def test_a_layer_of_both_directions_is_refused():
    with pytest.raises(NotRecurrent, match="this GRU is bidirectional: it reads the future too"):
        as_system(nn.GRU(3, 4, bidirectional=True))


@pytest.mark.parametrize("thing", [nn.Linear(3, 4), nn.Sequential(nn.GRU(3, 4))])
def test_what_is_not_recurrent_is_refused(thing):
    with pytest.raises(NotRecurrent, match="is no recurrent layer or cell"):
        as_system(thing)


def test_what_is_no_module_is_refused():
    with pytest.raises(NotRecurrent, match="a recurrent layer, but this is str"):
        as_system("lstm")


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(4), r"\(batch, time, feature\), but this is \(4,\)"),
        ([[1.0]], r"but this is list"),
        (torch.zeros(0, 5, 3), "x has no rows"),
        (torch.zeros(2, 0, 3), "x has 0 steps, but 1 or more are needed"),
        (torch.zeros(2, 5, 4), r"shape \(2, 5, 4\), but this GRU takes 3 features: \(batch, time, 3\).*batch-first"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(x, message):
    with pytest.raises(BadInput, match=message):
        check_sequence(as_system(nn.GRU(3, 4)), x)


def test_a_start_that_does_not_fit_is_refused():
    system = as_system(nn.GRU(3, 4))
    with pytest.raises(StateMismatch, match="the state has 2 rows, but x has 3"):
        system.start(torch.zeros(1, 2, 4), 3)
    with pytest.raises(StateMismatch, match="shape"):
        system.start(torch.zeros(1, 3, 5), 3)


def test_a_cell_that_cuts_the_gradient_is_refused():
    class Cut(nn.Module):
        input_size = hidden_size = 2

        def forward(self, x, state):
            return state.detach() + x

    with pytest.raises(BadInput, match=r"next state of Cut does not depend .*detached"):
        hs.measure.jacobians(Cut(), torch.zeros(1, 3, 2))


def test_a_state_of_whole_numbers_only_is_refused():
    class Counter(nn.Module):
        input_size = 1

        def initial_state(self, batch):
            return torch.zeros(batch, 1, dtype=torch.int64)

        def forward(self, x, state):
            return state + 1

    with pytest.raises(BadInput, match="no part of real numbers"):
        as_system(Counter())
