import copy
import gc
import io
import warnings
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import hiddenstate as hs
from hiddenstate.cells import listeners
from hiddenstate.errors import BadInput, HiddenStateWarning, NotRecurrent
from hiddenstate.regularize import Penalty, WeightDrop, activity, norm_stabilizer, temporal
from tests.support.calling import WAYS, Calling
from tests.support.cells import CELLS

X = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))


class Tagger(nn.Module):
    """Two layers that nobody has heard of."""

    def __init__(self, kind=nn.LSTM, **settings):
        super().__init__()
        self.low = kind(3, 4, batch_first=True, **settings)
        self.high = kind(4, 4, batch_first=True)
        self.read = nn.Linear(4, 2)

    def forward(self, x):
        self.seen = [self.low(x)[0]]
        self.seen.append(self.high(self.seen[0])[0])
        return self.read(self.seen[1])


class Stepper(nn.Module):
    """A cell in a loop of its own."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x, steps=None):
        h, seen = None, []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            seen.append(h[0] if isinstance(h, tuple) else h)
        self.seen = torch.stack(seen, dim=1)
        return self.seen.sum()


def cost(h, lengths=None):
    return 2 * activity(h, lengths) + 3 * temporal(h, lengths) + 5 * norm_stabilizer(h, lengths)


def watch(model):
    return Penalty(model, activity=2, temporal=3, norm_stabilizer=5)


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_it_is_the_sum_over_layers_of_the_terms_of_their_outputs(kind):
    model = Tagger(kind)
    with watch(model) as penalty:
        model(X)
        assert torch.allclose(penalty(), cost(model.seen[0]) + cost(model.seen[1]))


def test_its_gradient_is_that_of_the_terms():
    model = Tagger()
    with watch(model) as penalty:
        loss = model(X).square().sum() + penalty()
        loss.backward()
    found = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    (model(X).square().sum() + cost(model.seen[0]) + cost(model.seen[1])).backward()
    for one, weight in zip(found, model.parameters(), strict=True):
        assert torch.allclose(one, weight.grad, atol=1e-6)


def test_only_what_is_asked_for_is_paid():
    model = Tagger()
    with Penalty(model, temporal=0.5) as penalty:
        model(X)
        assert torch.allclose(penalty(), 0.5 * (temporal(model.seen[0]) + temporal(model.seen[1])))


@pytest.mark.parametrize(
    "settings",
    [{}, {"batch_first": True}, {"num_layers": 2, "bidirectional": True}, {"proj_size": 2}],
    ids=["time first", "batch first", "deep, both ways", "projected"],
)
def test_a_layer_may_be_the_model_in_any_layout(settings):
    layer = nn.LSTM(3, 4, **settings)
    with watch(layer) as penalty:
        output, _ = layer(X)
        assert torch.allclose(penalty(), cost(output if layer.batch_first else output.transpose(0, 1)))
        single, _ = layer(X[0])
        assert torch.allclose(penalty(), cost(single.unsqueeze(0)))


def test_padding_of_packed_sequences_is_not_paid_for():
    layer, lengths = nn.GRU(3, 4), torch.tensor([3, 5])
    with watch(layer) as penalty:
        output, _ = layer(pack_padded_sequence(X, lengths, batch_first=True, enforce_sorted=False))
        padded, _ = pad_packed_sequence(output, batch_first=True)
        assert torch.allclose(penalty(), cost(padded, lengths))
        penalty_grad(layer, penalty, X)


def penalty_grad(layer, penalty, x):
    layer(x)
    penalty().backward()
    assert all(weight.grad.isfinite().all() for weight in layer.parameters())


def test_padding_of_padded_sequences_is_not_paid_for_once_lengths_are_told():
    model, lengths = Tagger(), torch.tensor([3, 5])
    with watch(model) as penalty:
        model(X)
        assert torch.allclose(penalty(lengths), cost(model.seen[0], lengths) + cost(model.seen[1], lengths))
        model(X)
        with pytest.raises(BadInput, match=r"lengths have shape \(3,\), but layer low ran 2 rows"):
            penalty([1, 2, 3])


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_the_steps_of_a_cell_are_joined(kind):
    model = Stepper(kind(3, 4))
    with watch(model) as penalty:
        model(X)
        assert torch.allclose(penalty(), cost(model.seen))
        penalty_grad(model, penalty, X)


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_a_cell_may_be_stepped_from_outside(kind):
    cell = kind(3, 4)
    with watch(cell) as penalty:
        for _ in range(2):
            h, seen = None, []
            for x in X.repeat(1, 8, 1).unbind(1):  # more steps than model calls would be kept
                h = cell(x, h)
                seen.append(h[0] if isinstance(h, tuple) else h)
            assert torch.allclose(penalty(), cost(torch.stack(seen, dim=1)))


@pytest.mark.parametrize("sample", CELLS.values(), ids=CELLS)
def test_cells_of_ones_own_are_paid_for(sample):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = sample.cell()

        def forward(self, x):
            layer = hs.cells.as_layer(self.cell, x[:, 0])
            native, seen = layer.to_native(layer.initial(len(x))), []
            for t in range(x.shape[1]):
                _, native = layer.split(self.cell(x[:, t], native))
                state = layer.to_state(native, batch=len(x))
                name = "h" if "h" in state else next(iter(state))
                seen.append(state[name].movedim(state.batch_axis[name], 0).flatten(1))
            return torch.stack(seen, dim=1)

    model, x = Model(), sample.x()
    with watch(model) as penalty:
        states = model(x)
        assert torch.allclose(penalty(), cost(states))


def test_rows_that_end_early_stop_paying():
    class Shrinking(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(3, 4)

        def forward(self, x, rows):
            h, seen = None, []
            for t, n in enumerate(rows):
                h = self.cell(x[:n, t], None if h is None else h[:n])
                seen.append(torch.cat([h, h.new_zeros(len(x) - n, 4)]))
            return torch.stack(seen, dim=1)

    model = Shrinking()
    with watch(model) as penalty:
        states = model(X, [2, 2, 1])
        assert torch.allclose(penalty(), cost(states, [3, 2]))


def test_hs_recurrent_is_a_layer_too():
    model = hs.Recurrent(nn.GRUCell, 3, 4)
    with watch(model) as penalty:
        output, _ = model(X)
        assert torch.allclose(penalty(), cost(output), atol=1e-6)


def test_a_layer_inside_weight_drop_is_found():
    model = nn.Sequential(WeightDrop(nn.LSTM(3, 4, batch_first=True), 0.5))
    with watch(model) as penalty:
        output, _ = model(X)
        assert torch.allclose(penalty(), cost(output))


def test_several_runs_pay_their_mean():
    model = Tagger()
    with watch(model) as penalty:
        model(X)
        first = cost(model.seen[0]) + cost(model.seen[1])
        model(2 * X)
        assert torch.allclose(penalty(), (first + cost(model.seen[0]) + cost(model.seen[1])) / 2)


def test_a_run_of_one_step_pays_for_its_activity_only():
    layer = nn.GRU(3, 4, batch_first=True)
    with watch(layer) as penalty:
        output, _ = layer(X[:, :1])
        assert torch.allclose(penalty(), 2 * activity(output))


def test_asked_twice_it_has_nothing_to_say():
    model = Tagger()
    with watch(model) as penalty:
        with pytest.raises(BadInput, match=r"no run to pay for.*loss = criterion\(model\(x\), y\) \+ penalty\(\)"):
            penalty()
        model(X)
        penalty()
        with pytest.raises(BadInput, match="no run to pay for"):
            penalty()


def test_in_evaluation_and_without_gradients_it_is_zero():
    model = Tagger()
    with watch(model) as penalty:
        with torch.no_grad():
            model(X)
            assert penalty() == 0
        model.eval()
        model(X)
        assert penalty() == 0
        model.train()
        with pytest.raises(BadInput, match="no run to pay for"):
            penalty()


def test_a_loss_that_went_backward_without_it_is_not_paid_for_later():
    model = Tagger()
    with watch(model) as penalty:
        model(X).sum().backward()
        (model(X).sum() + penalty()).backward()
        model(X)
        assert torch.allclose(penalty(), cost(model.seen[0]) + cost(model.seen[1]))


def test_a_gradient_of_a_gradient_does_not_end_a_run():
    layer, x = nn.RNN(3, 4, batch_first=True), X.clone().requires_grad_()
    with watch(layer) as penalty:
        output, _ = layer(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        assert torch.allclose(penalty(), cost(output))
        (slope.square().sum() + cost(output)).backward()


def test_a_layer_that_runs_again_in_backward_is_paid_for_once():
    from torch.utils.checkpoint import checkpoint

    layer = nn.GRU(3, 4, batch_first=True)
    with watch(layer) as penalty:
        for _ in range(2):
            output, _ = checkpoint(layer, X, use_reentrant=False)
            loss = output.sum() + penalty()
            loss.backward()
        with pytest.raises(BadInput, match="no run to pay for"):
            penalty()


def test_no_graph_outlives_its_step():
    model, seen = Tagger(), []
    with watch(model) as penalty:
        for _ in range(3):
            loss = model(X).sum() + penalty()
            seen += [weakref.ref(h) for h in model.seen]
            loss.backward()
            model.seen = []
            del loss
        gc.collect()
        assert [ref() for ref in seen] == [None] * 6


def test_whoever_never_asks_is_warned_and_keeps_a_bounded_number_of_runs():
    model = Tagger()
    with watch(model) as penalty:
        for _ in range(16):
            model(X)
        with pytest.warns(HiddenStateWarning, match=r"more than 16 times.*not asked.*torch.no_grad\(\)"):
            model(X)
        paid = penalty()
        last = cost(model.seen[0]) + cost(model.seen[1])
        assert torch.allclose(paid, last)  # the mean of 16 equal runs


def test_runs_that_nobody_asks_for_are_let_go():
    model, seen = Tagger(), []
    with watch(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", HiddenStateWarning)
        for _ in range(20):
            model(X)
            seen += [weakref.ref(h) for h in model.seen]
        model.seen = []
        gc.collect()
        assert sum(ref() is not None for ref in seen) == 32  # two layers in sixteen calls
    gc.collect()
    assert not any(ref() is not None for ref in seen)


def traces(model):
    """What somebody who listens could have left in the modules."""
    return [(set(vars(m)), len(m._forward_hooks) + len(m._forward_pre_hooks)) for m in model.modules()]


def test_closing_leaves_no_trace():
    model = Tagger()
    before = traces(model)
    penalty = watch(model)
    assert [layer.name for layer in hs.layers(model) if listeners(layer.module)] == ["low", "high"]
    penalty.close()
    penalty.close()
    assert traces(model) == before
    assert repr(penalty).endswith("2 layers, closed)")
    with pytest.raises(BadInput, match="this Penalty was closed"):
        penalty()
    with pytest.raises(ZeroDivisionError), watch(model):
        1 / 0  # noqa: B018
    assert traces(model) == before


def test_a_penalty_that_is_dropped_leaves_no_trace():
    model = Tagger()
    before = traces(model)
    penalty = watch(model)
    del penalty
    gc.collect()
    assert traces(model) == before


def test_outputs_and_gradients_of_the_model_stay_as_they_were():
    model = Tagger()
    plain = copy.deepcopy(model)
    with watch(model):
        model(X).sum().backward()
    plain(X).sum().backward()
    assert torch.equal(model(X), plain(X))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_copy_of_the_model_is_not_watched():
    model = Tagger()
    with watch(model) as penalty:
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (twin, torch.load(file, weights_only=False)):
            other(X)
            with pytest.raises(BadInput, match="no run to pay for"):
                penalty()


def test_a_failed_call_leaves_the_next_one_whole():
    model = Tagger()
    with watch(model) as penalty:
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 5, 99))
        model(X)
        assert torch.allclose(penalty(), cost(model.seen[0]) + cost(model.seen[1]))


KINDS = st.sampled_from([nn.RNN, nn.LSTM, nn.GRU])
STATES = st.sampled_from([None, "zeros"])


def start(rnn, rows, how):
    """No state, or what the layer would start from."""
    layer = hs.cells.as_layer(rnn)
    return None if how is None else layer.to_native(layer.initial(rows))


@pytest.mark.parametrize("way", WAYS)
@given(kind=KINDS, state=STATES, rows=st.integers(1, 3), steps=st.integers(1, 6), chunk=st.none() | st.integers(1, 4))
def test_however_a_layer_is_called_it_pays_the_same(way, kind, state, rows, steps, chunk):
    x = torch.randn(rows, steps, 3, requires_grad=True)
    model = Calling(kind(3, 4, batch_first=True), way, chunk)
    state = start(model.rnn, rows, state)
    terms = cost if steps > 1 else lambda h: 2 * activity(h)
    with watch(model) as penalty:
        model(x, state)
        paid = penalty()
        paid.backward()
    found = [weight.grad.clone() for weight in model.rnn.parameters()]
    torch.testing.assert_close(paid, terms(model.rnn(x)[0]), atol=1e-6, rtol=1e-4)
    model.zero_grad()
    model(x, state)
    terms(model.seen).backward()  # in the same way: nested states have no gradient in a reentrant checkpoint
    for mine, weight in zip(found, model.rnn.parameters(), strict=True):
        torch.testing.assert_close(mine, weight.grad, atol=1e-5, rtol=1e-3)


def test_sequences_that_start_anew_within_one_call_are_runs_of_their_own():
    class Twins(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(3, 4, batch_first=True)

        def forward(self, *pairs):
            self.seen = [self.gru(x, h)[0] for x, h in pairs]

    model, own = Twins(), torch.randn(1, 2, 4)
    for states in ((None, None), (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)), (own, own), (own, own.clone())):
        with watch(model) as penalty:
            model((X, states[0]), (2 * X, states[1]))
            assert torch.allclose(penalty(), (cost(model.seen[0]) + cost(model.seen[1])) / 2)


def test_a_state_that_is_changed_on_the_way_goes_on():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(3, 4, batch_first=True)

        def forward(self, x):
            h, seen = None, []
            for step in x.split(1, dim=1):
                out, h = self.gru(step, None if h is None else 0.9 * h)
                seen.append(out)
            self.seen = torch.cat(seen, dim=1)

    model = Masked()
    with watch(model) as penalty:
        model(X)
        assert torch.allclose(penalty(), cost(model.seen))


def test_a_part_of_the_model_may_be_called_alone():
    model = nn.ModuleDict({"encoder": Calling(nn.GRU(3, 4, batch_first=True), "layer(x)", 2), "other": nn.Linear(1, 1)})
    with watch(model) as penalty:
        for _ in range(2):
            model["encoder"](X)
            assert torch.allclose(penalty(), cost(model["encoder"].seen))


def test_a_layer_deep_inside_a_reentrant_checkpoint_is_named():
    from torch.utils.checkpoint import checkpoint

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.low, self.high = nn.GRU(3, 4, batch_first=True), nn.GRU(4, 4, batch_first=True)

        def forward(self, x):
            self.seen = self.high(checkpoint(lambda x: 2 * self.low(x)[0], x, use_reentrant=True))[0]
            return self.seen

    model, x = Deep(), X.clone().requires_grad_()
    with watch(model) as penalty:
        loss = model(x).sum() + penalty()
        assert torch.allclose(loss, model.seen.sum() + cost(model.seen))
        with pytest.warns(HiddenStateWarning, match="the layer low runs inside .*use_reentrant=True.*not paid for"):
            loss.backward()


def test_a_reentrant_checkpoint_that_went_backward_is_not_paid_for_later():
    model, x = Calling(nn.GRU(3, 4, batch_first=True), "checkpoint(layer), reentrant"), X.clone().requires_grad_()
    with watch(model) as penalty:
        model(x).sum().backward()
        with pytest.raises(BadInput, match="no run to pay for"):
            penalty()


def test_it_goes_with_a_carried_state():
    layer = nn.LSTM(3, 4, batch_first=True)
    with watch(layer) as penalty, hs.Carry(layer):
        for _ in range(2):
            output, _ = layer(X)
            assert torch.allclose(penalty(), cost(output))


@pytest.mark.parametrize("make", [Tagger, lambda: Stepper(nn.GRUCell(3, 4))], ids=["fused", "cell"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks there
def test_a_compiled_model_is_watched_as_well(make):
    torch._dynamo.reset()
    model = make()
    with watch(model) as penalty:
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(2):
            model(X)
            wanted = penalty()
            compiled(X)
            assert torch.allclose(penalty(), wanted)


def test_autocast_is_welcome():
    layer = nn.GRU(3, 4, batch_first=True)
    with watch(layer) as penalty, torch.autocast("cpu", torch.bfloat16):
        output, _ = layer(X)
        assert penalty().dtype == torch.float32
        assert output.requires_grad


WRONG = {
    "nothing": ({}, "every coefficient is zero"),
    "negative": ({"activity": -1}, "activity is a coefficient from 0, but this is -1"),
    "infinite": ({"temporal": float("inf")}, "temporal is a coefficient from 0, but this is inf"),
    "a word": ({"norm_stabilizer": "much"}, "norm_stabilizer is a coefficient from 0, but this is 'much'"),
}


@pytest.mark.parametrize(("coefficients", "complaint"), WRONG.values(), ids=WRONG)
def test_coefficients_that_cannot_be_are_refused(coefficients, complaint):
    with pytest.raises(BadInput, match=complaint):
        Penalty(Tagger(), **coefficients)


def test_a_model_without_recurrence_is_refused():
    with pytest.raises(NotRecurrent, match=r"Linear has no recurrent layer or cell .* hs\.record\(model, graph=True\)"):
        Penalty(nn.Linear(2, 2), activity=1)


def test_it_shows_what_it_adds():
    with watch(Tagger()) as penalty:
        assert repr(penalty) == "Penalty(activity=2, temporal=3, norm_stabilizer=5; 2 layers)"


def _in_pieces(rnn, x, cut):
    h = None
    for piece in x.split(cut, dim=1):
        _, h = rnn(piece, h)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("term", ["activity", "temporal", "norm_stabilizer"])
@pytest.mark.parametrize("cut", [1, 3])
def test_a_layer_that_a_script_steps_pays_what_one_call_does(kind, term, cut):
    rnn, x = kind(3, 5, batch_first=True), torch.randn(2, 20, 3)
    with Penalty(rnn, **{term: 1.0}) as penalty:
        rnn(x)
        whole = penalty()
        _in_pieces(rnn, x, cut)
        stepped = penalty()
    assert whole > 0
    torch.testing.assert_close(stepped, whole)
    grads = [torch.autograd.grad(cost, list(rnn.parameters()), retain_graph=True) for cost in (whole, stepped)]
    torch.testing.assert_close(*grads)


def test_a_model_that_a_script_steps_pays_what_one_call_does():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(3, 5, batch_first=True)

        def forward(self, x, hidden=None):
            return self.rnn(x, hidden)

    net, x = Net(), torch.randn(2, 20, 3)
    with Penalty(net, temporal=1.0) as penalty:
        net(x)
        whole = penalty()
        _in_pieces(net, x, 1)
        torch.testing.assert_close(penalty(), whole)


def test_steps_whose_state_is_dropped_pay_no_changes_and_it_is_said():
    rnn, x = nn.GRU(3, 5, batch_first=True), torch.randn(2, 6, 3)
    with Penalty(rnn, temporal=1.0) as penalty:
        for t in range(6):
            rnn(x[:, t : t + 1])
        with pytest.warns(HiddenStateWarning, match=r"6 runs of one step each, so temporal cost nothing.*Hand it on"):
            assert penalty() == 0


@pytest.mark.parametrize("where", ["model", "script"])
@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell, nn.GRU, nn.LSTM])
def test_two_sequences_in_turns_pay_the_mean_of_what_each_pays_alone(kind, where):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = kind(3, 5)

        def step(self, x, h):
            result = self.rnn(x if "Cell" in kind.__name__ else x.unsqueeze(0), h)
            return result if "Cell" in kind.__name__ else result[1]

        def forward(self, x, y):
            a = b = None
            for x_t, y_t in zip(x, y, strict=True):
                a, b = self.step(x_t, a), self.step(y_t, b)
            return a, b

        def alone(self, x):
            h = None
            for x_t in x:
                h = self.step(x_t, h)
            return h

    net, x, y = Pair(), torch.randn(10, 4, 3), torch.randn(10, 4, 3)
    with Penalty(net if where == "model" else net.rnn, temporal=1.0) as penalty:
        costs = []
        for sequence in (x, y):
            net.alone(sequence)
            costs.append(penalty())
        net(x, y)
        torch.testing.assert_close(penalty(), (costs[0] + costs[1]) / 2)
