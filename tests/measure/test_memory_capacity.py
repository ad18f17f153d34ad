import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.errors import BadInput, NotRecurrent
from hiddenstate.measure.linear import as_filter
from hiddenstate.measure.memory_capacity import _estimate, _walk
from hiddenstate.measure.torch_system import as_system
from tests.support.dynamics import LinearNet, delay_line, gaussian_reservoir, ring
from tests.support.untouched import untouched


def noise(steps=3000, batch=1):
    return torch.rand(batch, steps, 1) * 2 - 1


# --- values that are known ---


def test_a_delay_line_of_ten_remembers_ten():
    found = hs.measure.memory_capacity(delay_line(10), noise(), lags=20)
    torch.testing.assert_close(found.curve, torch.tensor([1.0] * 10 + [0.0] * 10, dtype=torch.float64))
    assert found.total == pytest.approx(10)
    assert found.exact
    assert str(found) == "memory capacity 10.00 of 10 over 20 lags (exact, for a linear layer under white input)"


def test_a_ring_of_twenty_remembers_twenty_in_all():
    found = hs.measure.memory_capacity(ring(20, 0.9), noise(), lags=200)
    assert found.curve[:20].tolist() == pytest.approx([0.98522] * 20, abs=5e-6)
    torch.testing.assert_close(found.curve[20:40], 0.9**40 * found.curve[:20])
    assert found.total == pytest.approx(20, abs=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_a_gaussian_reservoir_remembers_as_much_as_it_has_units(seed):
    net = gaussian_reservoir(50, seed=seed)
    found = hs.measure.memory_capacity(net, noise(), lags=400)
    assert found.total == pytest.approx(50, abs=0.01)
    assert (found.curve >= 0).all()
    assert (found.curve <= 1 + 1e-9).all()


def test_a_naive_estimate_falls_into_the_trap():
    net, x = gaussian_reservoir(50).double(), noise(5000).double()
    valid = torch.ones(1, 5000, dtype=torch.bool)
    naive = _estimate(_walk(as_system(net, x), x, valid), x, valid, lags=200, skip=200, size=50)
    assert naive.total < 45


@pytest.mark.parametrize(("net", "expected"), [(delay_line(10), 10), (ring(20, 0.9), 20), (gaussian_reservoir(50), 50)])
def test_estimated_in_coordinates_of_its_own_the_capacity_is_there(net, expected):
    x = noise(8000).double()
    linear = as_filter(as_system(net), x)
    valid = torch.ones(1, 8000, dtype=torch.bool)
    found = _estimate(linear.walk(x[..., 0]), x, valid, lags=200, skip=200, size=len(net.w))
    assert found.total == pytest.approx(expected, rel=0.01)


def test_what_the_input_does_not_reach_remembers_nothing():
    same = LinearNet(0.9 * torch.eye(5), torch.ones(5, 1))  # five copies of one unit
    found = hs.measure.memory_capacity(same, noise(), lags=100)
    assert found.total == pytest.approx(1)
    torch.testing.assert_close(found.curve, (1 - 0.81) * 0.81 ** torch.arange(100, dtype=torch.float64))
    deaf = LinearNet(0.9 * torch.eye(5), torch.zeros(5, 1))
    assert hs.measure.memory_capacity(deaf, noise(), lags=10).total == 0


def test_coordinates_do_not_matter():
    net = gaussian_reservoir(6)
    turn = torch.randn(6, 6)
    turned = LinearNet(turn @ net.w.detach() @ turn.inverse(), turn @ net.v.detach())
    torch.testing.assert_close(
        hs.measure.memory_capacity(turned, noise(), lags=30).curve,
        hs.measure.memory_capacity(net, noise(), lags=30).curve,
        rtol=0,
        atol=1e-3,
    )


# --- layers that are not linear, inputs that are not white ---


def test_a_relu_that_stays_positive_is_estimated_like_the_delay_line_it_is():
    rnn = nn.RNN(1, 10, nonlinearity="relu", bias=False, batch_first=True)
    with torch.no_grad():
        rnn.weight_hh_l0.copy_(torch.diag(torch.ones(9), -1))
        rnn.weight_ih_l0.copy_(torch.eye(10)[:, :1])
    found = hs.measure.memory_capacity(rnn, torch.rand(1, 3000, 1), lags=20)
    torch.testing.assert_close(found.curve, torch.tensor([1.0] * 10 + [0.0] * 10, dtype=torch.float64))
    assert not found.exact
    assert "estimated; lags below" in str(found)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_no_layer_remembers_more_than_it_has_coordinates(kind):
    layer = kind(1, 8, batch_first=True)
    x = noise(2000)
    with untouched(layer):
        found = hs.measure.memory_capacity(layer, x, lags=20)
    assert 0.9 < found.total < 16
    assert found.curve[0] > 0.9


def test_a_state_of_pure_noise_remembers_nothing():
    class Forgetful(nn.Module):
        input_size, hidden_size = 1, 4

        def forward(self, x, state):
            return torch.sin(1e4 * (state + x))

    assert hs.measure.memory_capacity(Forgetful(), noise(), lags=20).total < 0.1


def test_of_a_predictable_input_more_can_be_told():
    slow = noise(4000).cumsum(1).diff(dim=1, n=1)
    smooth = (slow[:, 1:] + slow[:, :-1]) / 2  # each input is half the one before
    found = hs.measure.memory_capacity(delay_line(5), smooth, lags=8)
    assert not found.exact
    assert found.curve[:5].tolist() == pytest.approx([1] * 5)
    assert found.curve[5] > 0.1  # though the line does not hold it
    assert str(found).endswith("more than the state holds, since these inputs tell of each other: give white noise)")


def test_features_are_added_up():
    class Two(nn.Module):
        input_size, hidden_size = 2, 6

        def forward(self, x, state):
            return torch.cat([x, state[:, :4]], dim=1)

    found = hs.measure.memory_capacity(Two(), torch.randn(1, 3000, 2), lags=5)
    torch.testing.assert_close(found.curve, torch.tensor([2.0, 2.0, 2.0, 0.0, 0.0], dtype=torch.float64))


def test_padding_never_counts():
    layer = nn.GRU(1, 4, batch_first=True)
    x = noise(1500, batch=3)
    lengths = torch.tensor([1500, 1500, 700])
    x[2, 700:] = 0.0
    expected = hs.measure.memory_capacity(layer, x, lags=10, lengths=lengths)
    x[2, 700:] = float("nan")
    found = hs.measure.memory_capacity(layer, x, lags=10, lengths=lengths)
    assert torch.equal(found.curve, expected.curve)
    assert found.total != hs.measure.memory_capacity(layer, x[:2], lags=10).total


def test_the_default_lags_follow_the_state_and_the_sequences():
    assert len(hs.measure.memory_capacity(delay_line(3), noise(1000)).curve) == 12
    assert len(hs.measure.memory_capacity(delay_line(30), noise(400)).curve) == 100


def test_an_unstable_linear_layer_is_estimated():
    net = LinearNet(torch.linalg.qr(torch.randn(4, 4))[0], torch.randn(4, 1))
    found = hs.measure.memory_capacity(net, noise(2000), lags=10)
    assert not found.exact
    assert 0 <= found.total <= 4


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.randn(1, 50, 1), {"lags": 40}, "40 lags of a state of 3 coordinates need 16 steps .* leave 11"),
        (torch.randn(1, 50, 1), {"lags": 0}, "0 lags"),
        (torch.zeros(0, 50, 1), {}, "no rows"),
        (torch.randn(1, 50), {}, r"x has shape \(1, 1, 50\), but this GRU takes 1 features"),
    ],
)
def test_what_cannot_be_measured_is_refused(x, options, message):
    with pytest.raises(BadInput, match=message):
        hs.measure.memory_capacity(nn.GRU(1, 3, batch_first=True), x, **options)


def test_nan_is_said_with_step_and_row():
    x = noise(500)
    x[0, 77] = float("nan")
    with pytest.raises(BadInput, match="nan at step 77 of row 0"):
        hs.measure.memory_capacity(nn.GRU(1, 3, batch_first=True), x, lags=5)


def test_both_directions_are_refused():
    with pytest.raises(NotRecurrent, match="bidirectional"):
        hs.measure.memory_capacity(nn.GRU(1, 3, bidirectional=True, batch_first=True), noise())
