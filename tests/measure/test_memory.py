import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hiddenstate as hs
from hiddenstate.errors import BadInput, NotRecurrent
from hiddenstate.measure.lag_curve import band, by_lag, half_life, reach
from tests.measure.readers import Last, Tagger, slow_curve
from tests.support.cells import CELLS
from tests.support.dynamics import LinearNet, forgetting, leaky_integrator, zeroed
from tests.support.untouched import untouched

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


def test_layers_take_x_in_their_own_layout_unless_told():
    first, second = nn.LSTM(3, 4, batch_first=True), nn.LSTM(3, 4)
    second.load_state_dict(first.state_dict())
    x = torch.randn(2, 6, 3)
    expected = hs.measure.memory(first, x).curve
    torch.testing.assert_close(hs.measure.memory(second, x.transpose(0, 1)).curve, expected)
    torch.testing.assert_close(hs.measure.memory(second, x, time_axis=1).curve, expected)
    torch.testing.assert_close(hs.measure.memory(first, x.transpose(0, 1), batch_axis=1).curve, expected)


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


def test_a_time_first_model_is_measured_along_its_own_axis():
    class TimeFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.RNN(3, 4)
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.rnn(x)[0])

    model, x = TimeFirst(), torch.randn(5, 2, 3)
    for told in ({}, {"time_axis": 0}, {"batch_axis": 1}):
        found = hs.measure.memory(model, x, **told)
        assert found.rows.shape == (2, 5)
        assert (found.curve > 0).all()
    assert str(hs.measure.memory(model, x)).endswith("time on axis 0, rows on axis 1: so rnn took it")


def test_a_model_with_one_output_for_a_sequence():
    model, x = Last(), torch.randn(4, 9, 3)
    found = hs.measure.memory(model, x)
    leaf = x.clone().requires_grad_()
    model(leaf).sum().backward()
    torch.testing.assert_close(found.rows, leaf.grad.norm(dim=2).flip(1))
    torch.testing.assert_close(found.curve, found.rows.mean(0))
    assert (found.low > 0).all()
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
    found = hs.measure.memory(model, x, 2.0, output=lambda result: result["scores"])
    torch.testing.assert_close(found.curve, 2 * hs.measure.memory(model.rnn, x).curve)


# --- padding ---


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(3, 4, batch_first=True),
        lambda: nn.LSTM(3, 4, bidirectional=True, batch_first=True),
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
    layer, x = nn.GRU(3, 4, batch_first=True), torch.randn(2, 5, 3)
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
    layer, x = nn.GRU(3, 4, batch_first=True), torch.randn(2, 5, 3)
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
@pytest.mark.parametrize(
    "make", [lambda: nn.GRU(3, 4, batch_first=True), lambda: hs.Recurrent(nn.GRUCell, 3, 4)], ids=["gru", "own"]
)
def test_nobody_who_listens_hears_a_measurement(measure, make):
    layer, x = make(), torch.randn(2, 5, 3)
    with hs.record(layer) as recording, hs.regularize.Penalty(layer, activity=1.0) as penalty:
        measure(layer, x)
        assert not list(recording)
        with pytest.raises(BadInput, match="no run to pay for"):
            penalty()


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
        (nn.GRU(3, 4, batch_first=True), torch.zeros(0, 5, 3), {}, "nothing to measure: the input has 0 rows"),
        (nn.GRU(3, 4, batch_first=True), torch.zeros(2, 0, 3), {}, "nothing to measure"),
        (nn.GRU(3, 4, batch_first=True), torch.zeros(5), {}, r"\(batch, time, ...\), but this is \(5,\)"),
        (nn.GRU(3, 4, batch_first=True), torch.zeros(2, 5, 3), {"at": 7}, "step 7 is asked for, but row 0 has 5 steps"),
        (
            nn.GRU(3, 4, batch_first=True),
            torch.zeros(2, 5, 3),
            {"at": -6},
            "step -6 is asked for, but row 0 has 5 steps",
        ),
        (
            nn.GRU(3, 4, batch_first=True),
            torch.zeros(2, 5, 3),
            {"time_axis": 2},
            "time_axis is 1 .* but this is time on axis 2",
        ),
        (
            nn.GRU(3, 4, batch_first=True),
            torch.zeros(2, 5, 3),
            {"output": lambda y: y.argmax(-1)},
            "int64, which has no gradient.*argmax",
        ),
        (
            nn.GRU(3, 4, batch_first=True),
            torch.zeros(2, 5, 3),
            {"output": lambda y: y.detach()},
            "does not depend on the input.*no_grad",
        ),
        (nn.GRU(3, 4, batch_first=True), torch.zeros(2, 5, 3), {"output": lambda y: None}, "returned NoneType"),
        (
            nn.GRU(3, 4, batch_first=True),
            torch.zeros(2, 5, 3),
            {"output": lambda y: y[:1, 0]},
            r"shape \(1, 4\).*2 rows of 5 steps",
        ),
        (nn.Linear(3, 4), torch.zeros(2, 5, dtype=torch.int64), {}, None),
        (nn.Sequential(nn.Flatten()), torch.zeros(2, 5, dtype=torch.int64), {}, "int64, which has no gradient"),
    ],
)
def test_what_cannot_be_measured_is_refused(model, x, options, message):
    with pytest.raises(BadInput if message else RuntimeError, match=message):
        hs.measure.memory(model, x, **options)


def test_what_is_no_module_is_refused():
    with pytest.raises(NotRecurrent, match=r"an nn.Module, but this is function"):
        hs.measure.memory(lambda x: x, torch.zeros(1, 2, 3))


def test_a_layer_that_ignores_everything_has_no_memory():
    found = hs.measure.memory(zeroed(nn.RNN(2, 3, batch_first=True)), torch.randn(2, 4, 2))
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


# --- reading a curve of influence over lag ---


@given(rate=st.floats(0.05, 0.99), peak=st.integers(0, 3))
def test_the_half_life_of_an_exponential_is_exact(rate, peak):
    lags = torch.arange(200, dtype=torch.float64)
    curve = rate ** (lags - peak).abs()  # it may rise before it falls
    assert half_life(curve) == pytest.approx(peak + math.log(2) / -math.log(rate), rel=1e-9)


def test_it_is_exact_beyond_the_end_too():
    assert half_life(0.99 ** torch.arange(10, dtype=torch.float64)) == pytest.approx(math.log(2) / -math.log(0.99))


def test_what_never_fades_has_no_half_life():
    assert half_life(torch.ones(5)) == math.inf
    assert half_life(torch.tensor([1.0, 2.0, 3.0])) == math.inf


def test_a_curve_of_zeros_has_none_either():
    assert math.isnan(half_life(torch.zeros(5)))


def test_a_sudden_end_counts_where_the_line_crosses_the_half():
    assert half_life(torch.tensor([1.0, 1.0, 0.0])) == 1.5


def test_reach_counts_to_the_last_lag_above_the_threshold():
    assert reach(torch.tensor([1.0, 0.5, 0.005, 0.02, 0.001]), 0.01) == 4
    assert reach(torch.tensor([0.0, 0.0, 1.0, 0.0]), 0.01) == 3  # a pure delay
    assert reach(torch.zeros(3), 0.01) == 0


def test_lags_are_counted_from_each_rows_own_end():
    norms = torch.arange(8.0).reshape(2, 4)
    found = by_lag(norms, torch.tensor([3, 1]))
    assert found[0].tolist() == [3, 2, 1, 0]
    assert found[1, :2].tolist() == [5, 4]
    assert found[1, 2:].isnan().all()


# --- heads of any shape, taps, and no input at all ---


class Headed(nn.Module):
    """A GRU whose head makes of its states whatever it likes."""

    def __init__(self, head, batch_first=True):
        super().__init__()
        self.gru, self.head = nn.GRU(2, 6, batch_first=batch_first), head

    def forward(self, x):
        return self.head(self.gru(x)[0])


class Grid(nn.Module):
    """A horizon of 4 steps of 3 features, read from the last state."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 12)

    def forward(self, h):
        return self.out(h[:, -1]).reshape(-1, 4, 3)


class Flattened(nn.Module):
    def __init__(self, grid):
        super().__init__()
        self.grid = grid

    def forward(self, x):
        return self.grid(x).flatten(1)


class AtSteps(nn.Module):
    def __init__(self, steps, axis=1):
        super().__init__()
        self.steps, self.axis = steps, axis

    def forward(self, h):
        return h.index_select(self.axis, torch.tensor(self.steps))


def test_the_shape_of_a_head_does_not_matter():
    grid, x = Headed(Grid()), torch.randn(3, 9, 2)
    torch.testing.assert_close(hs.measure.memory(grid, x).curve, hs.measure.memory(Flattened(grid), x).curve)


@pytest.mark.parametrize("steps", [[4], [0, 4], [2, 4]])
@pytest.mark.parametrize("batch_first", [True, False])
def test_lags_are_counted_from_the_last_tap(steps, batch_first):
    model = Headed(AtSteps(steps, axis=int(batch_first)), batch_first)
    x = torch.randn(3, 20, 2)
    given = x if batch_first else x.transpose(0, 1)
    found = hs.measure.memory(model, given, time_axis=int(batch_first))
    cut = hs.measure.memory(model, given.narrow(int(batch_first), 0, 5), time_axis=int(batch_first))
    assert found.tap == 4
    assert cut.tap is None
    torch.testing.assert_close(found.curve, cut.curve)
    assert "counted from step 4, the last that moves the output" in str(found)


def test_an_output_with_steps_of_its_own_is_asked_at_its_end_as_ever():
    class Delayed(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(2, 4, batch_first=True)

        def forward(self, x):
            return torch.roll(self.gru(x)[0], 3, dims=1)

    found = hs.measure.memory(Delayed(), torch.randn(2, 12, 2))
    assert found.tap is None
    assert found.curve[:3].tolist() == [0, 0, 0]


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(11, 3), nn.LSTM(3, 4, batch_first=True)

    def forward(self, tokens):
        return self.lstm(self.embed(tokens))[0]


class Stepped(nn.Module):
    """A cell of one's own."""

    def __init__(self):
        super().__init__()
        self.input_size, self.hidden_size = 3, 4
        self.inner = nn.Linear(7, 4)

    def forward(self, x, h):
        h = torch.tanh(self.inner(torch.cat([x, h], dim=1)))
        return h, h


@pytest.mark.parametrize("model", [nn.LSTM(3, 5), nn.GRU(3, 5, batch_first=True), Headed(Grid()), Reader(), Stepped()])
def test_without_an_input_one_is_made_up(model):
    with untouched(model):
        found = hs.measure.memory(model, steps=17, trials=3)
    assert found.rows.shape == (3, 17)
    assert torch.equal(hs.measure.memory(model, steps=17, trials=3).curve, found.curve)  # the same every time


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hs.measure.memory(nn.GRU(2, 3), steps=0), "8 trials of 0 steps are asked for"),
        (lambda: hs.measure.memory(Headed(nn.Linear(5, 5))), "no input could be made up that Headed takes: give x"),
    ],
)
def test_an_input_that_cannot_be_made_up_is_asked_for(call, message):
    with pytest.raises(BadInput, match=message):
        call()


def test_the_band_holds_the_true_mean_about_as_often_as_it_says():
    generator, inside = torch.Generator().manual_seed(0), 0
    for _ in range(400):
        rows = torch.randn(40, 1, generator=generator).exp()  # whose mean is exp(1/2)
        low, high = band(rows)
        inside += bool(low <= math.exp(0.5) <= high)
    assert 0.85 < inside / 400 < 0.99


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_the_spread_holds_its_share_of_the_rows_and_never_falls_below_zero(share):
    found = hs.measure.memory(torch.nn.GRU(2, 5, batch_first=True), torch.randn(40, 12, 2))
    low, high = found.spread(share)
    inside = ((found.rows >= low) & (found.rows <= high)).float().mean(0)
    assert float(low.min()) >= 0
    torch.testing.assert_close(inside, torch.full((12,), share), atol=0.06, rtol=0)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_data_set_is_measured_over_all_its_rows(kind):
    torch.manual_seed(0)
    model = Last()
    model.lstm = kind(3, 5, batch_first=True)
    batches = [torch.randn(rows, steps, 3) for rows, steps in ((3, 9), (2, 12), (1, 5))]
    found = hs.measure.memory(model, ((batch, torch.zeros(len(batch))) for batch in batches))
    alone = [hs.measure.memory(model, row.unsqueeze(0)).rows[0] for batch in batches for row in batch]
    assert found.rows.shape == (6, 12)
    for row, curve in zip(found.rows, alone, strict=True):
        torch.testing.assert_close(row[: len(curve)], curve)
        assert row[len(curve) :].isnan().all()
    torch.testing.assert_close(found.curve, found.rows.nanmean(0))
    assert "over 6 rows" in str(found)


def test_lengths_in_a_batch_count_and_an_empty_data_set_is_refused():
    gru, rows = nn.GRU(2, 5, batch_first=True), [torch.randn(steps, 2) for steps in (7, 3)]
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    found = hs.measure.memory(gru, iter([(padded, torch.tensor([7, 3]), torch.zeros(2))]))
    torch.testing.assert_close(found.rows[1, :3], hs.measure.memory(gru, rows[1].unsqueeze(0)).rows[0])
    with pytest.raises(BadInput, match="the data set has no batches"):
        hs.measure.memory(gru, iter(()))


@pytest.mark.parametrize("time_first", [True, False])
def test_one_number_for_all_rows_and_steps_in_one_axis(time_first):
    class Flat(nn.Module):  # as language models give it to their loss
        def __init__(self):
            super().__init__()
            self.gru, self.head = nn.GRU(3, 5, batch_first=not time_first), nn.Linear(5, 4)

        def forward(self, x):
            return self.head(self.gru(x)[0]).reshape(-1, 4)

    model, x = Flat(), torch.randn(7, 2, 3) if time_first else torch.randn(2, 7, 3)
    order = (7, 2) if time_first else (2, 7)
    found = hs.measure.memory(model, x, output=lambda out: out.view(*order, -1))
    torch.testing.assert_close(hs.measure.memory(model, x).curve, found.curve)
    last = -1 if time_first else (slice(None), -1)
    total = hs.measure.memory(model, x, output=lambda out: out.view(*order, -1)[last].sum())
    assert found.rows.shape == total.rows.shape == (2, 7)
    assert (total.rows <= found.rows * 2 + 1e-6).all()  # the norm of a sum of four rows of the matrix
    assert bool(total.curve.any())


@pytest.mark.parametrize("cell", [nn.RNNCell(3, 6), nn.LSTMCell(3, 6), nn.GRUCell(3, 6)])
def test_of_a_cell_it_is_said_which_axis_was_taken_for_time(cell):
    found = str(hs.measure.memory(cell, torch.randn(20, 4, 3)))
    assert "time on axis 1, rows on axis 0: assumed, since a cell is stepped along (batch, time, ...)" in found
    assert "assumed" not in str(hs.measure.memory(cell, torch.randn(20, 4, 3), time_axis=0))
