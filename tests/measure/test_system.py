import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.cells import as_layer
from hiddenstate.errors import BadInput, StateMismatch
from hiddenstate.measure.system import System, at_rest, check_sequence
from hiddenstate.measure.torch_system import as_system
from tests.support.cells import CELLS
from tests.support.untouched import untouched


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


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(4), r"\(batch, time, feature\), but this is \(4,\)"),
        ([[1.0]], r"but this is list"),
        (torch.zeros(0, 5, 3), "x has no rows"),
        (torch.zeros(2, 0, 3), "x has 0 steps, but 1 or more are needed"),
        (torch.zeros(2, 5, 4), r"shape \(2, 5, 4\), but this GRU takes 3 features: \(batch, time, 3\).*time_axis=0"),
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


# --- measuring at rest ---


def quiet_and_loud():
    net = nn.Sequential(nn.GRU(3, 4), nn.Dropout(), nn.BatchNorm1d(4))
    net[2].eval()
    net[0].weight_hh_l0.requires_grad_(False)
    net[0].bias_hh_l0.grad = torch.ones(12)
    return net


def test_inside_all_is_quiet_and_outside_all_is_as_before():
    net = quiet_and_loud()
    with untouched(net), torch.no_grad():
        with at_rest(net):
            assert torch.is_grad_enabled()
            assert not any(module.training for module in net.modules())
            assert not any(weight.requires_grad for weight in net.parameters())
            net[2].running_mean += 1
            torch.rand(3)
        assert not torch.is_grad_enabled()


def test_an_exception_changes_nothing_either():
    net = quiet_and_loud()
    with untouched(net), pytest.raises(KeyboardInterrupt), at_rest(net):
        raise KeyboardInterrupt


def test_carrying_and_recording_rest_too_and_users_hooks_do_not():
    net = nn.GRU(3, 4)
    seen = []
    net.register_forward_hook(lambda *_: seen.append("user"))
    carry = hs.Carry(net)
    x = torch.randn(5, 2, 3)
    with hs.record(net) as recording, untouched(net), at_rest(net):
        net(x)
        net.forward(x)
    assert not list(recording)
    assert carry.state is None
    assert seen == ["user"]
    net(x)
    assert carry.state is not None
    carry.close()


def test_a_cell_that_names_no_input_size_has_one_all_the_same():
    class Elman(nn.Module):  # as in torch's own tutorial
        def __init__(self):
            super().__init__()
            self.hidden_size = 8
            self.i2h, self.i2o = nn.Linear(5 + 8, 8), nn.Linear(5 + 8, 3)

        def forward(self, x, hidden):
            both = torch.cat([x, hidden], dim=1)
            return self.i2o(both), torch.tanh(self.i2h(both))

    assert System(as_layer(Elman(), torch.randn(1, 5))).features() == 5
    assert hs.measure.positions(Elman(), steps=20).distances.shape == (20, 20)
    assert hs.measure.fixed_points(Elman(), starts=4).starts == 4
