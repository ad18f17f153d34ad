import pytest
import torch
from torch import nn

from hiddenstate.measure.linear import _cascade, _reached, as_filter
from hiddenstate.measure.torch_system import as_system
from tests.support.dynamics import LinearNet, gaussian_reservoir

X = torch.zeros(1, 1, 1)


def poles():
    return torch.tensor([0.9, 0.5 + 0.3j, 0.5 - 0.3j, -0.2, 0.0], dtype=torch.complex128)


def test_the_cascade_is_all_pass():
    found = _cascade(poles())
    gram = found.advance @ found.advance.mH + found.enter.unsqueeze(1) @ found.enter.unsqueeze(0).conj()
    torch.testing.assert_close(gram, torch.eye(5, dtype=torch.complex128))  # white input keeps a white state


def test_the_cascade_has_the_poles_it_was_given():
    assert _cascade(poles()).advance.diagonal().tolist() == poles().tolist()
    assert not _cascade(poles()).advance.triu(1).any()


def test_its_state_spans_what_the_net_itself_spans():
    net = gaussian_reservoir(4, radius=0.5).double()
    x = torch.randn(1, 400, 1, dtype=torch.float64)
    states = as_system(net).walk(x)[0, 50:]
    basis = as_filter(as_system(net), x).walk(x[..., 0])[0, 50:]
    weights = torch.linalg.lstsq(basis, states.to(basis.dtype)).solution
    torch.testing.assert_close(basis @ weights, states.to(basis.dtype), rtol=0, atol=1e-9)


def test_only_what_the_input_reaches_is_kept():
    w = torch.block_diag(0.5 * torch.eye(2), torch.tensor([[0.1, 1.0], [0.0, 0.2]])).double()
    assert _reached(w, torch.tensor([1.0, 0.0, 0.0, 0.0]).double()).shape == (1, 1)
    assert _reached(w, torch.tensor([1.0, 1.0, 0.0, 1.0]).double()).shape == (3, 3)
    assert _reached(w, torch.zeros(4).double()).shape == (0, 0)


@pytest.mark.parametrize("layer", [nn.RNN(1, 3), nn.GRU(1, 3), nn.LSTM(1, 3), nn.RNN(1, 3, nonlinearity="relu")])
def test_what_bends_is_no_filter(layer):
    assert as_filter(as_system(layer), X) is None


def test_a_constant_drift_is_still_linear():
    class Affine(nn.Module):
        input_size = hidden_size = 1

        def forward(self, x, state):
            return 0.5 * state + x + 3

    found = as_filter(as_system(Affine(), X), X)
    torch.testing.assert_close(found.capacity(3), 0.75 * 0.25 ** torch.arange(3, dtype=torch.float64))


def test_a_net_that_never_forgets_is_no_filter():
    assert as_filter(as_system(LinearNet(torch.eye(2), torch.ones(2, 1))), X) is None


def test_two_inputs_are_no_filter():
    assert as_filter(as_system(LinearNet(0.5 * torch.eye(2), torch.eye(2))), torch.zeros(1, 1, 2)) is None
