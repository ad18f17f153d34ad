import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hiddenstate as hs
from hiddenstate.errors import BadInput, NotRecurrent
from tests.support.untouched import untouched


def test_the_two_terms_of_a_plain_rnn_are_those_of_the_article():
    rnn, x = nn.RNN(3, 5, batch_first=True).requires_grad_(False), torch.randn(1, 6, 3)
    found = hs.measure.contributions(rnn, x)
    h = torch.zeros(5)
    for t in range(6):
        wx, wh = rnn.weight_ih_l0 @ x[0, t], rnn.weight_hh_l0 @ h
        assert float(found.input[0, t]) == pytest.approx(float(wx.norm()), rel=1e-4)
        assert float(found.memory[0, t]) == pytest.approx(float(wh.norm()), rel=1e-4, abs=1e-6)
        h = torch.tanh(wx + rnn.bias_ih_l0 + wh + rnn.bias_hh_l0)
    assert found.by == "weights"
    assert float(found.share[0, 0]) == 0  # nothing is remembered yet


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.LSTMCell, 4), (nn.GRUCell, 3)])
def test_gates_make_up_the_whole(kind, gates):
    found = hs.measure.contributions(kind(2, 4), torch.randn(3, 5, 2))
    assert len(found.gates) == gates
    for name in ("input", "memory"):
        parts = torch.stack([getattr(gate, name) for gate in found.gates.values()])
        torch.testing.assert_close(parts.square().sum(0).sqrt(), getattr(found, name))
    assert "candidate: input" in str(found)


def test_a_layer_of_a_stack_is_driven_by_the_one_below():
    layer, x = nn.GRU(2, 4, num_layers=2, batch_first=True), torch.randn(2, 5, 2)
    below = nn.GRU(2, 4, batch_first=True)
    below.load_state_dict({name: weight for name, weight in layer.state_dict().items() if name.endswith("l0")})
    above = hs.measure.contributions(layer, x, level=1)
    expected = below(x)[0] @ layer.weight_ih_l1.T
    torch.testing.assert_close(above.input, expected.norm(dim=-1).detach(), rtol=1e-4, atol=1e-5)


class Leaky(nn.Module):
    """A cell of one's own, without two terms that one could name."""

    hidden_size, input_size = 3, 3

    def forward(self, x, h):
        h = 0.5 * h + x
        return h, h


@given(seed=st.integers(0, 100))
def test_of_any_other_cell_it_is_what_is_missing_without(seed):
    x = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(seed))
    found = hs.measure.contributions(Leaky(), x)
    assert found.by == "ablation"
    torch.testing.assert_close(found.input, x.norm(dim=2))
    past, h = [], torch.zeros(2, 3)
    for step in x.unbind(1):
        past.append((0.5 * h).norm(dim=1))
        h = 0.5 * h + step
    torch.testing.assert_close(found.memory, torch.stack(past, dim=1))


def test_padding_counts_for_nothing():
    layer, x = nn.LSTM(2, 3, batch_first=True), torch.randn(2, 6, 2)
    x[1, 3:] = float("nan")
    found = hs.measure.contributions(layer, x, lengths=torch.tensor([6, 3]))
    assert found.input.isnan().tolist() == [[False] * 6, [False] * 3 + [True] * 3]
    alone = hs.measure.contributions(layer, x[1:, :3])
    torch.testing.assert_close(found.memory[1:, :3], alone.memory)
    assert "nan" not in str(found)


def test_the_model_comes_back_untouched():
    layer = nn.LSTM(2, 3, num_layers=2, dropout=0.5).train()
    x = torch.randn(2, 4, 2)
    with untouched(layer):
        hs.measure.contributions(layer, x, level=-1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: hs.measure.contributions(nn.GRU(2, 3), torch.zeros(1, 4, 2), level=1),
            BadInput,
            "layer has 1: 0 to 0",
        ),
        (lambda: hs.measure.contributions(nn.GRU(2, 3), torch.zeros(1, 4, 5)), BadInput, "takes 2 features"),
        (
            lambda: hs.measure.contributions(nn.GRU(2, 3, bidirectional=True), torch.zeros(1, 4, 2)),
            NotRecurrent,
            "bidir",
        ),
        (lambda: hs.measure.contributions(nn.GRU(2, 3), torch.zeros(1, 4, 2).long()), BadInput, "embedding adds"),
    ],
)
def test_what_cannot_be_split_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_time_first_layers_are_measured_along_time(kind):
    layer, x = kind(3, 5), torch.randn(7, 2, 3)
    first = kind(3, 5, batch_first=True)
    first.load_state_dict(layer.state_dict())
    found, expected = hs.measure.contributions(layer, x), hs.measure.contributions(first, x.transpose(0, 1))
    torch.testing.assert_close(found.memory, expected.memory)
    assert found.input.shape == (2, 7)
    told = hs.measure.contributions(layer, x.transpose(0, 1), time_axis=1)
    torch.testing.assert_close(told.memory, expected.memory)
    cell = hs.measure.contributions(nn.GRUCell(3, 5), x, time_axis=0)
    assert cell.input.shape == (2, 7)
