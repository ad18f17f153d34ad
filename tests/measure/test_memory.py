import math

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.errors import BadInput, NotRecurrent
from hiddenstate.measure import sensitivity
from tests.support.cells import CELLS
from tests.support.dynamics import LinearNet, forgetting, leaky_integrator, zeroed
from tests.support.untouched import untouched


class Tagger(nn.Module):
    """Tokens to scores at each step."""

    def __init__(self, tokens=11, units=6, out=4, batch_first=True):
        super().__init__()
        self.embed = nn.Embedding(tokens, 5)
        self.gru = nn.GRU(5, units, batch_first=batch_first)
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(units)
        self.head = nn.Linear(units, out)

    def forward(self, tokens):
        y = self.drop(self.gru(self.embed(tokens))[0])
        return self.head(self.norm(y.transpose(1, 2)).transpose(1, 2))


class Last(nn.Module):
    """Real numbers to one score for a sequence."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 5, batch_first=True)
        self.head = nn.Linear(5, 1)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1]).squeeze(1)


def slow_curve(layer, x):
    """The obvious way: the whole Jacobian of the last output, one row of the batch after the other."""
    curves = []
    for row in x:
        jacobian = torch.autograd.functional.jacobian(lambda one: layer(one.unsqueeze(0))[0][0, -1], row)
        curves.append(jacobian.flatten(2).square().sum((0, 2)).sqrt().flip(0))  # (out, time, feature) -> (lag,)
    return torch.stack(curves).mean(0)


# --- values that are known ---


def test_a_leaky_integrator_forgets_geometrically():
    found = hs.measure.memory(leaky_integrator(0.1), torch.randn(3, 60, 1, dtype=torch.float64))
    expected = 0.1 * 0.9 ** torch.arange(60, dtype=torch.float64)
    torch.testing.assert_close(found.curve, expected, rtol=1e-12, atol=0)
    assert found.half_life == pytest.approx(6.579, abs=5e-4)
    assert found.length == 44  # 0.9 ** 44 is the first power below 1 %
    assert not found.cut_off
    assert found.exact


@pytest.mark.parametrize(("bias", "expected"), [(0, 1.0), (1, 2.213), (2, 5.461), (3, 14.27)])
def test_an_lstm_without_weights_forgets_by_its_bias(bias, expected):
    found = hs.measure.memory(forgetting(bias), torch.randn(2, 40, 1))
    assert found.half_life == pytest.approx(expected, rel=5e-4)
    assert found.half_life == pytest.approx(math.log(2) / math.log(1 + math.exp(-bias)), rel=1e-4)
    assert not found.input_reaches
    assert not found.curve.any()
    assert "does not move the output at all" in str(found)


@pytest.mark.parametrize(("bias", "expected"), [(0, 1.0), (1, 2.213), (2, 5.461), (3, 14.27)])
def test_an_lstm_with_input_weights_only_does_so_too(bias, expected):
    lstm = forgetting(bias)
    nn.init.normal_(lstm.weight_ih_l0)
    found = hs.measure.memory(lstm, torch.zeros(1, 60, 1))
    assert found.input_reaches
    assert found.half_life == pytest.approx(expected, rel=5e-4)


def test_a_linear_net_has_the_norms_of_its_powers():
    w, v = torch.randn(4, 4, dtype=torch.float64) / 2, torch.randn(4, 2, dtype=torch.float64)
    found = hs.measure.memory(LinearNet(w, v), torch.randn(5, 12, 2, dtype=torch.float64))
    expected = torch.stack([torch.linalg.matrix_norm(torch.linalg.matrix_power(w, k) @ v) for k in range(12)])
    torch.testing.assert_close(found.curve, expected)
    torch.testing.assert_close(found.low, found.high)  # every row of a linear net is alike


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"bidirectional": True}])
def test_of_any_layer_it_is_the_norm_of_the_whole_jacobian(kind, options):
    layer = kind(3, 4, batch_first=True, dtype=torch.float64, **options)
    x = torch.randn(2, 6, 3, dtype=torch.float64)
    torch.testing.assert_close(hs.measure.memory(layer, x).curve, slow_curve(layer, x))


def test_layers_take_x_batch_first_whatever_their_own_layout():
    first, second = nn.LSTM(3, 4, batch_first=True), nn.LSTM(3, 4)
    second.load_state_dict(first.state_dict())
    x = torch.randn(2, 6, 3)
    expected = hs.measure.memory(first, x).curve
    torch.testing.assert_close(hs.measure.memory(second, x).curve, expected)
    torch.testing.assert_close(hs.measure.memory(second, x.transpose(0, 1), time_axis=0).curve, expected)


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("probes", [None, 3])
def test_closed_forms_equal_autograd(kind, probes, monkeypatch):
    layer, x = kind(3, 4, dtype=torch.float64), torch.randn(3, 9, 3, dtype=torch.float64)
    lengths = torch.tensor([9, 4, 7])
    expected = hs.measure.memory(layer, x, lengths=lengths, probes=probes, output=lambda y: y)
    for pieces in (2**23, 3 * 4 * 7 * 2):
        monkeypatch.setattr(sensitivity, "_CHUNK", pieces)
        found = hs.measure.memory(layer, x, lengths=lengths, probes=probes)
        torch.testing.assert_close(found.rows, expected.rows, equal_nan=True)
        assert found.exact == expected.exact == (probes is None)


# --- any model ---


@pytest.mark.parametrize("sample", CELLS.values(), ids=CELLS)
def test_every_kind_of_cell_can_be_measured(sample):
    cell, x = sample.cell(), sample.x(batch=2, steps=7)
    with untouched(cell):
        found = hs.measure.memory(cell, x)
    assert found.curve.shape == (7,)
    assert found.curve[0] > 0


def test_a_stack_of_custom_cells_can_be_measured():
    layer = hs.Recurrent(nn.GRUCell, 3, 4, num_layers=2).double()
    torch.testing.assert_close(
        hs.measure.memory(layer, torch.ones(2, 5, 3, dtype=torch.float64)).curve,
        slow_curve(layer, torch.ones(2, 5, 3, dtype=torch.float64)),
    )


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


def test_a_time_first_model_is_measured_along_its_own_axis():
    class TimeFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.RNN(3, 4)
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.rnn(x)[0])

    model, x = TimeFirst(), torch.randn(5, 2, 3)
    found = hs.measure.memory(model, x, time_axis=0)
    assert found.rows.shape == (2, 5)
    assert (found.curve > 0).all()


def test_a_model_with_one_output_for_a_sequence():
    model, x = Last(), torch.randn(4, 9, 3)
    found = hs.measure.memory(model, x)
    leaf = x.clone().requires_grad_()
    model(leaf).sum().backward()
    torch.testing.assert_close(found.rows, leaf.grad.norm(dim=2).flip(1))
    torch.testing.assert_close(found.curve, found.rows.mean(0))
    assert (found.low <= found.curve).all()
    assert (found.curve <= found.high).all()


def test_another_step_than_the_last_can_be_asked_about():
    layer, x = nn.GRU(3, 4, batch_first=True), torch.randn(2, 8, 3)
    torch.testing.assert_close(hs.measure.memory(layer, x, at=4).curve, hs.measure.memory(layer, x[:, :5]).curve)
    torch.testing.assert_close(hs.measure.memory(layer, x, at=-4).curve, hs.measure.memory(layer, x[:, :5]).curve)


def test_outputs_and_arguments_of_a_model_can_be_said():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.RNN(3, 4, batch_first=True)

        def forward(self, x, scale):
            return {"scores": scale * self.rnn(x)[0]}

    model, x = Odd(), torch.randn(2, 5, 3)
    found = hs.measure.memory(model, x, args=(2.0,), output=lambda result: result["scores"])
    torch.testing.assert_close(found.curve, 2 * hs.measure.memory(model.rnn, x).curve)


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
    rnn = nn.RNN(1, 1, nonlinearity="relu", bias=False)
    nn.init.constant_(rnn.weight_hh_l0, 0.5), nn.init.constant_(rnn.weight_ih_l0, 0.5)
    torch.testing.assert_close(hs.measure.memory(rnn, torch.ones(1, 110, 1)).curve, found.curve)


# --- padding ---


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(3, 4),
        lambda: nn.LSTM(3, 4, bidirectional=True),
        lambda: hs.Recurrent(nn.GRUCell, 3, 4, bidirectional=True),
        lambda: CELLS["pair"].cell(torch.float32),
    ],
)
@pytest.mark.parametrize("filling", [0.0, 1e3, float("nan")])
def test_padding_never_counts(make, filling):
    layer = make()
    x, lengths = torch.randn(3, 7, 3), torch.tensor([7, 3, 5])
    alone = [hs.measure.memory(layer, x[row : row + 1, : lengths[row]]).curve for row in range(3)]
    for row in range(3):
        x[row, lengths[row] :] = filling
    found = hs.measure.memory(layer, x, lengths=lengths)
    for row in range(3):
        torch.testing.assert_close(found.rows[row, : lengths[row]], alone[row])
        assert found.rows[row, lengths[row] :].isnan().all()
    torch.testing.assert_close(found.curve[:3], torch.stack([curve[:3] for curve in alone]).mean(0))
    torch.testing.assert_close(found.curve[5:], alone[0][5:])


def test_a_row_without_steps_does_not_count():
    layer, x = nn.GRU(3, 4), torch.randn(2, 5, 3)
    found = hs.measure.memory(layer, x, lengths=torch.tensor([5, 0]))
    torch.testing.assert_close(found.curve, hs.measure.memory(layer, x[:1]).curve)


# --- leaves no trace ---


@pytest.mark.parametrize("training", [True, False])
def test_the_model_comes_back_untouched(training):
    model = Tagger().train(training)
    model.head.bias.requires_grad_(False)
    model(torch.randint(11, (2, 3))).sum().backward()
    seen = []
    model.gru.register_forward_hook(lambda *_: seen.append(1))
    tokens = torch.randint(11, (2, 5))
    with untouched(model):
        hs.measure.memory(model, tokens)
    with untouched(model), pytest.raises(BadInput):
        hs.measure.memory(model, tokens, output=lambda y: y.argmax(-1))
    assert seen  # a hook on a part of a model sees the model's run


def test_dropout_is_off_while_measuring():
    model, tokens = Tagger().train(), torch.randint(11, (2, 5))
    torch.testing.assert_close(hs.measure.memory(model, tokens).curve, hs.measure.memory(model.eval(), tokens).curve)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_grad_mode_outside_does_not_matter(mode):
    layer, x = nn.GRU(3, 4), torch.randn(2, 5, 3)
    expected = hs.measure.memory(layer, x).curve
    with mode():
        torch.testing.assert_close(hs.measure.memory(layer, x).curve, expected)


def test_a_carried_state_is_neither_used_nor_changed():
    model, x = Last(), torch.randn(2, 5, 3)
    expected = hs.measure.memory(model, x).curve
    carry = hs.Carry(model)
    model(x)
    before = carry.state
    torch.testing.assert_close(hs.measure.memory(model, x).curve, expected)
    torch.testing.assert_close(hs.measure.memory(model.lstm, x).rows.shape, torch.Size([2, 5]))
    assert all(torch.equal(carry.state[part], before[part]) for part in before)
    carry.close()


@pytest.mark.parametrize("measure", [hs.measure.memory, hs.measure.jacobians], ids=lambda measure: measure.__name__)
@pytest.mark.parametrize("make", [lambda: nn.GRU(3, 4), lambda: hs.Recurrent(nn.GRUCell, 3, 4)], ids=["gru", "own"])
def test_nobody_who_listens_hears_a_measurement(measure, make):
    layer, x = make(), torch.randn(2, 5, 3)
    with hs.record(layer) as recording, hs.regularize.Penalty(layer, activity=1.0) as penalty:
        measure(layer, x)
        assert not list(recording)
        with pytest.raises(BadInput, match="no run to pay for"):
            penalty()


def test_tokens_may_be_given_to_the_embedding_by_name():
    class Named(Tagger):
        def forward(self, tokens):
            y = self.gru(self.embed(input=tokens))[0]
            return self.head(self.norm(y.transpose(1, 2)).transpose(1, 2))

    model, named, tokens = Tagger(), Named(), torch.randint(11, (2, 5))
    named.load_state_dict(model.state_dict())
    torch.testing.assert_close(hs.measure.memory(named, tokens).curve, hs.measure.memory(model, tokens).curve)


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
    layer, x = nn.GRU(3, 4), torch.randn(2, 9, 3)
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


# --- what cannot be measured ---


def test_sequences_too_short_to_see_the_end_are_said_to_be():
    found = hs.measure.memory(leaky_integrator(0.01), torch.zeros(1, 20, 1, dtype=torch.float64))
    assert found.cut_off
    assert found.length == 20
    assert found.half_life == pytest.approx(math.log(2) / -math.log(0.99))
    assert "at least 20 steps" in str(found)
    assert "(extrapolated)" in str(found)
    assert "too short" in str(found)


@pytest.mark.parametrize(
    ("model", "x", "options", "message"),
    [
        (nn.GRU(3, 4), torch.zeros(0, 5, 3), {}, "nothing to measure: the input has 0 rows"),
        (nn.GRU(3, 4), torch.zeros(2, 0, 3), {}, "nothing to measure"),
        (nn.GRU(3, 4), torch.zeros(5), {}, r"\(batch, time, ...\), but this is \(5,\)"),
        (nn.GRU(3, 4), torch.zeros(2, 5, 3), {"at": 7}, "step 7 is asked for, but row 0 has 5 steps"),
        (nn.GRU(3, 4), torch.zeros(2, 5, 3), {"at": -6}, "step -6 is asked for, but row 0 has 5 steps"),
        (nn.GRU(3, 4), torch.zeros(2, 5, 3), {"time_axis": 2}, "time_axis is 1 .* but is 2"),
        (
            nn.GRU(3, 4),
            torch.zeros(2, 5, 3),
            {"output": lambda y: y.argmax(-1)},
            "int64, which has no gradient.*argmax",
        ),
        (nn.GRU(3, 4), torch.zeros(2, 5, 3), {"output": lambda y: y.detach()}, "does not depend on the input.*no_grad"),
        (nn.GRU(3, 4), torch.zeros(2, 5, 3), {"output": lambda y: None}, "returned NoneType"),
        (nn.GRU(3, 4), torch.zeros(2, 5, 3), {"output": lambda y: y[:1, 0]}, r"shape \(1, 4\).*2 rows of 5 steps"),
        (nn.Linear(3, 4), torch.zeros(2, 5, dtype=torch.int64), {}, None),
        (nn.Sequential(nn.Flatten()), torch.zeros(2, 5, dtype=torch.int64), {}, "int64, which has no gradient"),
    ],
)
def test_what_cannot_be_measured_is_refused(model, x, options, message):
    with pytest.raises(BadInput if message else RuntimeError, match=message):
        hs.measure.memory(model, x, **options)


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
        hs.measure.memory(nn.GRU(3, 4), x)
    with pytest.raises(BadInput, match="the output of row 1 is not finite"):
        hs.measure.memory(Last(), x)


def test_what_is_no_module_is_refused():
    with pytest.raises(NotRecurrent, match=r"an nn.Module, but this is function"):
        hs.measure.memory(lambda x: x, torch.zeros(1, 2, 3))


def test_a_layer_that_ignores_everything_has_no_memory():
    found = hs.measure.memory(zeroed(nn.RNN(2, 3)), torch.randn(2, 4, 2))
    assert found.length == 0
    assert math.isnan(found.half_life)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_eval_on_cuda_works_and_leaves_cudnn_as_it_was(kind):
    layer = kind(3, 4, num_layers=2, batch_first=True).eval()
    x = torch.randn(2, 6, 3)
    expected = hs.measure.memory(layer, x).curve
    before = torch.backends.cudnn.enabled
    found = hs.measure.memory(layer.cuda(), x.cuda())
    assert torch.backends.cudnn.enabled == before
    torch.testing.assert_close(found.curve.cpu(), expected, rtol=1e-3, atol=1e-5)
    assert layer.weight_hh_l0.requires_grad
