from importlib import import_module

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.errors import BadInput, NotRecurrent
from hiddenstate.measure.torch_system import as_system
from tests.support.cells import CELLS
from tests.support.dynamics import zeroed
from tests.support.untouched import untouched

module = import_module("hiddenstate.measure.jacobians")  # the function has the name of its file

LAYERS = {
    "rnn": lambda: nn.RNN(3, 4, num_layers=2, batch_first=True),
    "relu": lambda: nn.RNN(3, 4, nonlinearity="relu", batch_first=True),
    "gru": lambda: nn.GRU(3, 4, num_layers=2, dropout=0.5, batch_first=True),
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, batch_first=True),
    "projected lstm": lambda: nn.LSTM(3, 4, num_layers=2, proj_size=2, batch_first=True),
}


def slow_jacobian(layer, x, state):
    """The obvious way: torch's Jacobian of the layer on one step, states laid out by hand."""
    parts = state if isinstance(state, tuple) else (state,)

    def step(*now):
        _, after = layer(x.reshape(1, 1, -1), now if isinstance(state, tuple) else now[0])
        return torch.cat([part.flatten() for part in (after if isinstance(after, tuple) else (after,))])

    found = torch.autograd.functional.jacobian(step, parts)
    return torch.cat([part.flatten(1) for part in found], dim=1)


@pytest.mark.parametrize("kind", LAYERS)
def test_each_step_has_torchs_own_jacobian(kind):
    layer = LAYERS[kind]().double().eval()
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    found = hs.measure.jacobians(layer, x)
    assert found.values.shape == (2, 4, found.states.shape[2], found.states.shape[2])
    for row in range(2):
        state = None
        for step in range(4):
            now = state if state is not None else layer(x[row, :1].unsqueeze(1))[1]
            if state is None:  # the first step is taken from zeros
                now = tuple(torch.zeros_like(p) for p in now) if isinstance(now, tuple) else torch.zeros_like(now)
            torch.testing.assert_close(found.values[row, step], slow_jacobian(layer, x[row, step], now))
            _, state = layer(x[row, step].reshape(1, 1, -1), now)
            parts = state if isinstance(state, tuple) else (state,)
            torch.testing.assert_close(found.states[row, step], torch.cat([part.flatten() for part in parts]))


def test_a_gru_without_weights_halves_its_state():
    found = hs.measure.jacobians(zeroed(nn.GRU(2, 3, batch_first=True)), torch.randn(2, 4, 2))
    torch.testing.assert_close(found.values, 0.5 * torch.eye(3).expand(2, 4, 3, 3))
    torch.testing.assert_close(found.spectral_radius, torch.full((2, 4), 0.5))


def test_an_lstm_without_weights_halves_its_cell_and_forgets_its_h():
    found = hs.measure.jacobians(zeroed(nn.LSTM(2, 3, batch_first=True)), torch.randn(2, 4, 2))
    expected = torch.tensor([0.5] * 3 + [0.0] * 3)
    torch.testing.assert_close(found.eigenvalues.real, expected.expand(2, 4, 6))
    torch.testing.assert_close(found.eigenvalues.imag, torch.zeros(2, 4, 6))
    torch.testing.assert_close(found.values[0, 0, :3, 3:], 0.25 * torch.eye(3))  # h is half of tanh(c / 2)


@pytest.mark.parametrize("sample", CELLS.values(), ids=CELLS)
def test_products_lead_from_the_first_state_to_the_last(sample):
    cell, x = sample.cell(), sample.x(batch=1, steps=4)
    with untouched(cell):
        found = hs.measure.jacobians(cell, x)
    product = torch.eye(found.values.shape[-1], dtype=torch.float64)
    for step in range(4):
        product = found.values[0, step] @ product
    system = as_system(cell, x)
    start = system.initial(1)
    push = 1e-6 * torch.randn_like(start)
    moved = (system.walk(x, start + push) - system.walk(x, start - push))[0, -1] / 2
    torch.testing.assert_close(product @ push[0], moved, rtol=1e-4, atol=1e-10)


def test_a_given_state_is_where_it_starts():
    layer, x = nn.LSTM(3, 4, batch_first=True), torch.randn(2, 6, 3)
    whole = hs.measure.jacobians(layer, x)
    _, (h, c) = layer(x[:, :3])
    for state in ((h, c), hs.State({"h": h, "c": c}, batch_axis=1), whole.states[:, 2]):
        rest = hs.measure.jacobians(layer, x[:, 3:], state=state)
        torch.testing.assert_close(rest.values, whole.values[:, 3:])


@pytest.mark.parametrize("filling", [0.0, 1e3, float("nan")])
@pytest.mark.parametrize("make", [lambda: nn.GRU(3, 4, batch_first=True), lambda: CELLS["pair"].cell(torch.float32)])
def test_padding_never_counts(make, filling):
    layer, x, lengths = make(), torch.randn(2, 5, 3), torch.tensor([5, 2])
    alone = hs.measure.jacobians(layer, x[1:, :2])
    x[1, 2:] = filling
    found = hs.measure.jacobians(layer, x, lengths=lengths)
    torch.testing.assert_close(found.values[1:, :2], alone.values)
    assert not found.values[1, 2:].any()
    assert found.spectral_radius[1, 2:].isnan().all()
    assert found.valid.sum() == 7
    assert "at 7 steps" in str(found)


def test_pieces_equal_the_whole(monkeypatch):
    layer, x = CELLS["pair"].cell(), torch.randn(2, 7, 3, dtype=torch.float64)
    whole = hs.measure.jacobians(layer, x)
    monkeypatch.setattr(module, "_CHUNK", 2 * 8 * 8 * 3)
    torch.testing.assert_close(hs.measure.jacobians(layer, x).values, whole.values)


def test_interrupting_keeps_the_steps_that_are_done(monkeypatch):
    layer, x = CELLS["pair"].cell(), torch.randn(2, 7, 3, dtype=torch.float64)
    whole = hs.measure.jacobians(layer, x)
    monkeypatch.setattr(module, "_CHUNK", 2 * 8 * 8 * 3)
    monkeypatch.setattr(module, "tracked", interrupted_after(2))
    found = hs.measure.jacobians(layer, x)
    assert found.interrupted
    assert found.valid.sum(1).tolist() == [6, 6]
    torch.testing.assert_close(found.values[:, :6], whole.values[:, :6])
    assert "interrupted, later steps are missing" in str(found)
    monkeypatch.setattr(module, "tracked", interrupted_after(0))
    with pytest.raises(KeyboardInterrupt):
        hs.measure.jacobians(layer, x)


def interrupted_after(count):
    def tracked(items, label, total):
        for number, item in enumerate(items):
            if number == count:
                raise KeyboardInterrupt
            yield item

    return tracked


@pytest.mark.parametrize("training", [True, False])
def test_the_layer_comes_back_untouched(training):
    layer = nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True).train(training)
    x = torch.randn(2, 5, 3)
    with untouched(layer):
        first = hs.measure.jacobians(layer, x)
    torch.testing.assert_close(hs.measure.jacobians(layer.eval(), x).values, first.values)
    x[0, 0] = float("nan")
    with untouched(layer), pytest.raises(BadInput):
        hs.measure.jacobians(layer, x)


def test_nothing_keeps_a_graph():
    found = hs.measure.jacobians(CELLS["pair"].cell(), torch.randn(1, 2, 3, requires_grad=True))
    assert not found.values.requires_grad
    assert not found.states.requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_grad_mode_outside_does_not_matter(mode):
    cell = CELLS["matrix"].cell()
    with mode():
        x = torch.randn(1, 3, 3, dtype=torch.float64)
        found = hs.measure.jacobians(cell, x).values
    torch.testing.assert_close(hs.measure.jacobians(cell, x.clone()).values, found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_work(dtype):
    found = hs.measure.jacobians(nn.GRU(2, 3, dtype=dtype, batch_first=True), torch.randn(1, 2, 2))
    assert found.values.dtype == dtype
    assert found.spectral_radius.isfinite().all()


def test_nan_in_the_states_is_said_with_step_and_row():
    x = torch.randn(3, 5, 2)
    x[2, 3] = float("nan")
    with pytest.raises(BadInput, match="the state has nan at step 3 of row 2"):
        hs.measure.jacobians(nn.GRU(2, 3, batch_first=True), x)


def test_both_directions_are_refused():
    with pytest.raises(NotRecurrent, match="bidirectional"):
        hs.measure.jacobians(nn.GRU(2, 3, bidirectional=True, batch_first=True), torch.zeros(1, 2, 2))


@pytest.mark.cuda
@pytest.mark.parametrize("kind", LAYERS)
def test_on_cuda_the_numbers_are_the_same(kind):
    layer = LAYERS[kind]().eval()
    x = torch.randn(2, 5, 3)
    expected = hs.measure.jacobians(layer, x).values
    torch.testing.assert_close(
        hs.measure.jacobians(layer.cuda(), x.cuda()).values.cpu(), expected, rtol=1e-3, atol=1e-5
    )


@pytest.mark.cuda
def test_custom_cells_on_cuda_too():
    cell = CELLS["readout"].cell(torch.float32)  # holds a GRUCell, whose fused kernel has no forward derivative
    x = torch.randn(2, 5, 3)
    expected = hs.measure.jacobians(cell, x).values
    torch.testing.assert_close(hs.measure.jacobians(cell.cuda(), x.cuda()).values.cpu(), expected, rtol=1e-3, atol=1e-5)
    assert hs.measure.lyapunov(cell, x.cuda(), k=1).exponents.isfinite().all()
