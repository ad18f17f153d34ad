"""Torch's own layers and cells: their states named, and handed back as they were."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import hiddenstate as hs
from hiddenstate.errors import NotRecurrent, StateMismatch
from tests.support.calling import subclassed

SETTINGS = list(itertools.product((1, 3), (False, True), (False, True), (False, True)))
KINDS = {"rnn": nn.RNN, "relu": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM, "projected": nn.LSTM}


def make(kind, layers=1, both=False, first=False, bias=True):
    extra = {"nonlinearity": "relu"} if kind == "relu" else {"proj_size": 2} if kind == "projected" else {}
    return KINDS[kind](3, 4, layers, bidirectional=both, batch_first=first, bias=bias, **extra)


@pytest.mark.parametrize(("layers", "both", "first", "bias"), SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["batched", "unbatched", "packed"])
def test_the_state_of_every_layer_goes_to_names_and_back(kind, form, layers, both, first, bias):
    module = make(kind, layers, both, first, bias)
    (layer,) = hs.layers(module)
    x = torch.randn(5, 5, 3)
    if form == "unbatched":
        x = torch.randn(7, 3)
    if form == "packed":
        x = pack_sequence([torch.randn(4, 3), torch.randn(2, 3)])
    rows, batched = layer.rows((x,), {})
    assert (rows, batched) == {"batched": (5, True), "unbatched": (1, False), "packed": (2, True)}[form]
    output, native = layer.split(module(x))
    assert layer.split(layer.join(output, native)) == (output, native)
    state = layer.to_state(native, batch=rows)
    assert state.batch == rows
    assert tuple(state) == layer.spec.parts
    back = layer.to_native(state, batched=batched)
    torch.testing.assert_close(back, native)
    module(x, back)
    initial = layer.to_native(layer.initial(rows), batched=batched)
    torch.testing.assert_close(module(x, initial), module(x))


@pytest.mark.parametrize(("layers", "both", "first", "bias"), SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_spec_says_what_the_layer_is(kind, layers, both, first, bias):
    (layer,) = hs.layers(make(kind, layers, both, first, bias))
    spec = layer.spec
    assert layer.kind == {"relu": "rnn", "projected": "lstm"}.get(kind, kind)
    assert (spec.layers, spec.directions, spec.bidirectional) == (layers, 2 if both else 1, both)
    assert (spec.input_size, spec.batch_first, spec.projection) == (3, first, 2 if kind == "projected" else 0)
    assert spec.sizes == {"lstm": {"h": 4, "c": 4}, "projected": {"h": 2, "c": 4}}.get(kind, {"h": 4})
    ends = ["", "_reverse"] if both else [""]
    assert list(layer.tracks) == [f"l{depth}{end}" for depth in range(layers) for end in ends]
    weights = {name.split("_l", 1)[1] for name, _ in layer.module.named_parameters()}
    assert {track[1:] for track in layer.tracks} == weights


@pytest.mark.parametrize(("kind", "parts"), [(nn.RNNCell, ("h",)), (nn.GRUCell, ("h",)), (nn.LSTMCell, ("h", "c"))])
@pytest.mark.parametrize("batched", [True, False])
def test_the_state_of_every_torch_cell_goes_to_names_and_back(kind, parts, batched):
    module = kind(3, 4)
    (layer,) = hs.layers(module)
    x = torch.randn(5, 3) if batched else torch.randn(3)
    assert layer.rows((x,), {}) == ((5, True) if batched else (1, False))
    output, native = layer.split(module(x))
    state = layer.to_state(native)
    assert tuple(state) == parts
    assert state.batch == (5 if batched else 1)
    assert output is (native[0] if len(parts) == 2 else native)
    torch.testing.assert_close(layer.to_native(state, batched=batched), native)
    again = layer.split(layer.join(output, native))
    assert again[0] is output
    torch.testing.assert_close(again[1], native)
    assert layer.tracks == ("l0",)
    assert layer.spec.sizes == dict.fromkeys(parts, 4)


def test_what_a_call_was_given_is_found_and_can_be_given():
    (layer,) = hs.layers(nn.GRU(3, 4))
    x, h = torch.randn(2, 5, 3), torch.randn(1, 5, 4)
    assert layer.given((x,), {}) is None
    assert layer.given((x, h), {}) is h
    assert layer.given((x,), {"hx": h}) is h
    assert layer.give((x,), {}, h) == ((x,), {"hx": h})
    assert layer.give((x, None), {}, h) == ((x, h), {})


def wrong(module, state, message):
    with pytest.raises(StateMismatch, match=message):
        hs.layers(module)[0].to_native(state)


def test_a_state_that_does_not_fit_is_refused_with_both_shapes():
    wrong(nn.LSTM(3, 4), hs.State({"h": torch.zeros(1, 2, 4)}, 1), r"parts h, but LSTM needs h, c.*hs\.Bridge")
    wrong(nn.GRU(3, 4, 2), hs.State({"h": torch.zeros(1, 2, 4)}, 1), r"\(1, 2, 4\).*needs \(2, batch, 4\): 2 layers")
    wrong(nn.GRU(3, 4), hs.State({"h": torch.zeros(2, 1, 4)}), r"batch axis at 0.*batch axis 1 also with batch_first")
    wrong(nn.GRUCell(3, 4), hs.State({"h": torch.zeros(1, 2, 4)}, 1), r"needs \(batch, 4\).*state\['h'\]\[0\]")


def test_a_native_state_of_another_kind_is_refused():
    with pytest.raises(StateMismatch, match=r"an LSTM's state is a tuple \(h, c\) of two tensors, but this is Tensor"):
        hs.layers(nn.LSTM(3, 4))[0].to_state(torch.zeros(1, 2, 4))
    with pytest.raises(StateMismatch, match=r"one tensor, but this is a tuple of 2\. Only an LSTM has a cell state"):
        hs.layers(nn.GRU(3, 4))[0].to_state((torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)))


def test_a_state_of_many_rows_for_an_unbatched_call_is_refused():
    (layer,) = hs.layers(nn.GRU(3, 4))
    with pytest.raises(StateMismatch, match=r"no batch axis, so it is one row, but the state has 3 rows"):
        layer.to_native(layer.initial(3), batched=False)


def test_initial_states_have_the_weights_dtype():
    assert hs.layers(nn.LSTM(3, 4).double())[0].initial(2)["c"].dtype == torch.float64


def output_alone(self, x, hx=None):
    return nn.GRU.forward(self, x, hx)[0]


def three(self, x, hx=None):
    return (*nn.LSTM.forward(self, x, hx), x)


def turned(self, x, hx=None):  # time first, whatever batch_first says
    out, h = nn.GRU.forward(self, x.transpose(0, 1), hx)
    return out.transpose(0, 1), h


def swapped(self, x, hx=None):
    return nn.GRU.forward(self, x, hx)[::-1]


def with_output(self, x, hx=None):
    h = nn.GRUCell.forward(self, x, hx)
    return 2 * h, h


def h_alone(self, x, hx=None):
    return nn.LSTMCell.forward(self, x, hx)[0]


@pytest.mark.parametrize(
    ("kind", "forward", "message"),
    [
        (nn.GRU, output_alone, r"at the layer '0': Output_AloneGRU returned Tensor, but layers of its kind return "
         r"\(output, state\).*Let its own forward return what super\(\).forward gives"),
        (nn.LSTM, three, r"ThreeLSTM returned a tuple of 3, but layers of its kind return \(output, state\)"),
        (nn.GRU, turned, r"TurnedGRU was called with 4 rows, as its batch_first.*its state has 5\..*hs\.register"),
        (nn.GRU, swapped, r"at the layer '0': part 'h' has shape \(5, 4, 4\).*SwappedGRU needs \(1, batch, 4\)"),
        (nn.GRUCell, with_output, r"With_OutputGRUCell returned a tuple of 2, but layers of its kind return h alone"),
        (nn.LSTMCell, h_alone, r"H_AloneLSTMCell returned Tensor, but layers of its kind return \(h, c\)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("attach", [hs.Carry, lambda model: hs.regularize.Penalty(model, activity=1.0)])
def test_a_subclass_that_returns_something_else_is_refused_by_name(kind, forward, message, attach):
    if forward is turned and attach is not hs.Carry:
        pytest.skip("nothing but the state it ends in tells")
    own = {"batch_first": True} if kind in (nn.GRU, nn.LSTM) else {}
    model = nn.Sequential(subclassed(kind, forward)(3, 4, **own))
    x = torch.randn(4, 5, 3) if forward is turned else torch.randn(*(5, 4)[: 1 + len(own)], 3)
    with attach(model) as attached:
        errors = pytest.raises((NotRecurrent, StateMismatch), match=message)
        if attach is hs.Carry:
            with errors:
                model(x)
            return
        model(x)
        with errors:
            attached()
