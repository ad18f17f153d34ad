"""The size of d output / d input at each step: closed forms, autograd and finite differences agree."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hiddenstate as hs
from hiddenstate.errors import BadInput
from hiddenstate.measure import sensitivity
from hiddenstate.measure.sensitivity import Leaf, at_steps, by_autograd, by_closed_form, tensor_of
from hiddenstate.measure.torch_system import as_system
from tests.measure.readers import Last, Tagger, slow_curve
from tests.support.cells import CELLS
from tests.support.dynamics import LinearNet, leaky_integrator
from tests.support.untouched import untouched

KINDS = [nn.RNN, nn.LSTM, nn.GRU]


def real(*lengths, time):
    return torch.arange(time) < torch.tensor(lengths).unsqueeze(1)


@given(kind=st.sampled_from(KINDS), lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_both_ways_give_the_squares_of_the_same_derivatives(kind, lengths):
    layer = kind(2, 3, batch_first=True, dtype=torch.float64)
    x, valid = torch.randn(len(lengths), 6, 2, dtype=torch.float64), real(*lengths, time=6)
    ends = valid.sum(1) - 1
    leaf = Leaf(x, valid, time_axis=1)
    slow = by_autograd(at_steps(layer(leaf.x)[0], ends, valid, time_axis=1), leaf, None)
    fast = by_closed_form(as_system(layer), leaf.x.detach(), valid, ends)
    last = int(ends.max())  # steps after the last end are not gone through
    torch.testing.assert_close(fast.squares[:, : last + 1], slow.squares[:, : last + 1])
    assert fast.exact
    assert slow.exact


@given(rows=st.integers(1, 3), steps=st.integers(1, 5), time_axis=st.sampled_from([0, 1]))
def test_a_weighted_sum_has_its_weights_as_derivatives(rows, steps, time_axis):
    x, weights = torch.randn(2, rows, steps, 3).unbind(0)
    turned = (lambda y: y) if time_axis == 1 else (lambda y: y.transpose(0, 1))
    leaf = Leaf(turned(x), torch.ones(rows, steps, dtype=torch.bool), time_axis=time_axis)
    torch.testing.assert_close(leaf.squares((leaf.x * turned(weights)).sum()), weights.double().square().sum(2))


def test_padding_is_emptied_so_that_its_nan_reaches_no_gradient():
    x = torch.full((1, 3, 2), torch.nan)
    x[:, :2] = 1
    assert Leaf(x, real(2, time=3), time_axis=1).x.tolist() == [[[1, 1], [1, 1], [0, 0]]]


def test_what_a_leaf_attaches_is_taken_off_again_also_after_an_exception():
    model, tokens = Tagger(), torch.randint(11, (2, 4))
    leaf = Leaf(tokens, torch.ones(2, 4, dtype=torch.bool), time_axis=1)
    with untouched(model), pytest.raises(KeyboardInterrupt), leaf.attached(model):
        raise KeyboardInterrupt


class Named:
    def __init__(self, **values):
        self.__dict__.update(values)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: y,
        lambda y: (y, None),
        lambda y: [[y], 3],
        lambda y: {"loss": None, "logits": y},
        lambda y: Named(last_hidden_state=y),
        lambda y: Named(output=y),
    ],
)
def test_the_output_is_found_in_what_models_usually_return(wrap):
    y = torch.zeros(2)
    assert tensor_of(wrap(y)) is y


def test_an_output_that_is_not_recognized_has_to_be_named():
    with pytest.raises(BadInput, match="returned dict, in which no output tensor was recognized: give output="):
        tensor_of({"mine": torch.zeros(2)})


@given(rows=st.integers(1, 3), steps=st.integers(1, 5), data=st.data())
def test_the_output_at_a_step_is_each_rows_own(rows, steps, data):
    y = torch.randn(rows, steps, 2)
    ends = torch.tensor(data.draw(st.lists(st.integers(0, steps - 1), min_size=rows, max_size=rows)))
    valid = torch.ones(rows, steps, dtype=torch.bool)
    expected = torch.stack([y[row, end] for row, end in enumerate(ends.tolist())])
    assert torch.equal(at_steps(y, ends, valid, time_axis=1), expected)
    if rows != steps:  # else no shape can tell
        assert torch.equal(at_steps(y.transpose(0, 1), ends, valid, time_axis=0), expected)


def test_one_output_for_a_row_is_taken_as_it_is_and_a_complex_one_as_two_numbers():
    valid, ends = torch.ones(2, 5, dtype=torch.bool), torch.tensor([4, 4])
    assert at_steps(torch.tensor([1.0, 2.0]), ends, valid, time_axis=1).tolist() == [[1], [2]]
    assert at_steps(torch.tensor([1 + 2j, 3j]), ends, valid, time_axis=1).tolist() == [[1, 2], [0, 3]]


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("probes", [None, 3])
def test_closed_forms_equal_autograd(kind, probes, monkeypatch):
    layer, x = kind(3, 4, dtype=torch.float64), torch.randn(3, 9, 3, dtype=torch.float64)
    lengths = torch.tensor([9, 4, 7])
    expected = hs.measure.memory(layer, x, lengths=lengths, probes=probes, output=lambda y: y, time_axis=1)
    for pieces in (2**23, 3 * 4 * 7 * 2):
        monkeypatch.setattr(sensitivity, "_CHUNK", pieces)
        found = hs.measure.memory(layer, x, lengths=lengths, probes=probes, time_axis=1)
        torch.testing.assert_close(found.rows, expected.rows, equal_nan=True)
        assert found.exact == expected.exact == (probes is None)


def test_tokens_are_followed_to_their_embedding():
    model = Tagger().double().eval()
    tokens = torch.randint(11, (3, 8))
    found = hs.measure.memory(model, tokens)
    embedded = nn.Sequential()
    embedded.forward = lambda e: (model.head(model.norm(model.gru(e)[0].transpose(1, 2)).transpose(1, 2)), None)
    torch.testing.assert_close(found.curve, slow_curve(embedded, model.embed(tokens).detach()))


def test_tokens_that_are_embedded_step_by_step_are_followed_too():
    class Loop(Tagger):
        def forward(self, tokens):
            state, outs = None, []
            for step in range(tokens.shape[1]):
                y, state = self.gru(self.embed(tokens[:, step : step + 1]), state)
                outs.append(y)
            return self.head(self.norm(torch.cat(outs, 1).transpose(1, 2)).transpose(1, 2))

    loop, tokens = Loop(), torch.randint(11, (3, 8))
    whole = Tagger()
    whole.load_state_dict(loop.state_dict())
    torch.testing.assert_close(hs.measure.memory(loop, tokens).curve, hs.measure.memory(whole, tokens).curve)


def test_a_model_may_turn_its_tokens_before_it_embeds_them():
    class Turned(Tagger):
        def forward(self, tokens):
            y = self.gru(self.embed(tokens.T))[0]
            return self.head(self.norm(y.permute(1, 2, 0)).transpose(1, 2))

    turned, tokens = Turned(batch_first=False), torch.randint(11, (3, 8))
    whole = Tagger()
    whole.load_state_dict(turned.state_dict())
    torch.testing.assert_close(hs.measure.memory(turned, tokens).curve, hs.measure.memory(whole, tokens).curve)


def test_tokens_may_be_given_to_the_embedding_by_name():
    class Named(Tagger):
        def forward(self, tokens):
            y = self.gru(self.embed(input=tokens))[0]
            return self.head(self.norm(y.transpose(1, 2)).transpose(1, 2))

    model, named, tokens = Tagger(), Named(), torch.randint(11, (2, 5))
    named.load_state_dict(model.state_dict())
    torch.testing.assert_close(hs.measure.memory(named, tokens).curve, hs.measure.memory(model, tokens).curve)


def test_many_outputs_are_estimated_from_random_directions():
    w = torch.linalg.qr(torch.randn(100, 100))[0] * 0.9
    net, x = LinearNet(w, torch.randn(100, 3)), torch.zeros(20, 6, 3)
    found = hs.measure.memory(net, x)
    expected = torch.stack(
        [torch.linalg.matrix_norm(torch.linalg.matrix_power(w, k) @ net.v.detach()) for k in range(6)]
    )
    assert not found.exact
    assert "estimated" in str(found)
    torch.testing.assert_close(found.curve, expected, rtol=0.1, atol=0)
    torch.testing.assert_close(found.curve, hs.measure.memory(net, x).curve)  # the same directions each time


def test_influence_far_below_the_square_root_of_a_float_is_still_seen():
    found = hs.measure.memory(leaky_integrator(0.5, torch.float32), torch.zeros(1, 110, 1))
    expected = 0.5 ** torch.arange(1, 111, dtype=torch.float64)
    torch.testing.assert_close(found.curve.double(), expected, rtol=1e-5, atol=0)
    rnn = nn.RNN(1, 1, nonlinearity="relu", bias=False, batch_first=True)
    nn.init.constant_(rnn.weight_hh_l0, 0.5), nn.init.constant_(rnn.weight_ih_l0, 0.5)
    torch.testing.assert_close(hs.measure.memory(rnn, torch.ones(1, 110, 1)).curve, found.curve)


def test_interrupting_keeps_what_is_done(monkeypatch):
    layer, x = CELLS["tensor"].cell(), CELLS["tensor"].x(batch=2, steps=5)
    whole = hs.measure.memory(layer, x)
    grad, calls = torch.autograd.grad, []

    def stubborn(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return grad(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", stubborn)
    with untouched(layer):
        found = hs.measure.memory(layer, x)
    assert found.interrupted
    assert not found.exact
    assert "interrupted" in str(found)
    torch.testing.assert_close(found.curve, whole.curve, rtol=0.9, atol=0)
    calls[:] = [1, 1]
    with pytest.raises(KeyboardInterrupt):  # nothing done, nothing to keep
        hs.measure.memory(layer, x)


def test_interrupting_closed_forms_keeps_the_nearest_lags(monkeypatch):
    layer, x = nn.GRU(3, 4, batch_first=True), torch.randn(2, 9, 3)
    whole = hs.measure.memory(layer, x, lengths=torch.tensor([9, 7]))

    def tracked(items, label, total):
        for number, item in enumerate(items):
            if number == 4:
                raise KeyboardInterrupt
            yield item

    monkeypatch.setattr(sensitivity, "tracked", tracked)
    found = hs.measure.memory(layer, x, lengths=torch.tensor([9, 7]))
    assert found.interrupted
    assert len(found.curve) == 4
    torch.testing.assert_close(found.rows[0], whole.rows[0, :4])
    torch.testing.assert_close(found.rows[1, :2], whole.rows[1, :2])
    assert found.rows[1, 2:].isnan().all()


def test_tokens_without_an_embedding_are_refused():
    class OneHot(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.RNN(7, 4, batch_first=True)

        def forward(self, tokens):
            return self.rnn(nn.functional.one_hot(tokens, 7).float())[0]

    with pytest.raises(BadInput, match=r"int64, so its gradient begins at an embedding, but no nn.Embedding"):
        hs.measure.memory(OneHot(), torch.randint(7, (2, 5)))


def test_nan_is_said_with_step_and_row():
    x = torch.randn(3, 6, 3)
    x[1, 4] = float("nan")
    with pytest.raises(BadInput, match="the output of row 1 from step 4 on is not finite"):
        hs.measure.memory(nn.GRU(3, 4, batch_first=True), x)
    with pytest.raises(BadInput, match="the output of row 1 is not finite"):
        hs.measure.memory(Last(), x)
