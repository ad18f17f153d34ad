import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import hiddenstate as hs
from hiddenstate.errors import BadInput, NotRecurrent
from hiddenstate.regularize import WeightDrop

LAYERS = {
    "lstm": lambda: nn.LSTM(3, 4, batch_first=True),
    "stack": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "projected": lambda: nn.LSTM(3, 4, proj_size=2),
    "gru": lambda: nn.GRU(3, 4, num_layers=2, bias=False),
    "rnn": lambda: nn.RNN(3, 4, nonlinearity="relu"),
}
each_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
X = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))


def recurrent_weights(layer):
    return {name: weight for name, weight in layer.named_parameters() if name.startswith("weight_hh")}


@each_layer
def test_in_evaluation_it_is_the_plain_layer_to_the_bit(make):
    layer = make()
    drop = WeightDrop(copy.deepcopy(layer), 0.5).eval()
    for found, wanted in zip(flat(drop(X)), flat(layer.eval()(X)), strict=True):
        assert torch.equal(found, wanted)


@each_layer
def test_in_training_the_kernel_sees_dropped_weights_and_only_those(make):
    layer = make()
    drop = WeightDrop(layer, 0.5)
    torch.manual_seed(7)
    found = drop(X)
    plain = copy.deepcopy(layer)
    torch.manual_seed(7)
    with torch.no_grad():
        for weight in recurrent_weights(plain).values():
            weight.copy_(nn.functional.dropout(weight, 0.5))
    for one, other in zip(flat(found), flat(plain(X)), strict=True):
        assert torch.equal(one, other)


@each_layer
def test_gradient_reaches_the_raw_weights_where_they_were_kept(make):
    drop = WeightDrop(make(), 0.5)
    flat(drop(X))[0].square().sum().backward()
    for name, weight in drop.layer.named_parameters():
        assert weight.grad is not None
        if name.startswith("weight_hh"):
            assert (weight.grad == 0).any()
            assert (weight.grad != 0).any()


@each_layer
def test_each_call_drops_anew_and_leaves_the_weights_alone(make):
    drop = WeightDrop(make(), 0.5)
    before = copy.deepcopy(drop.state_dict())
    assert not torch.equal(flat(drop(X))[0], flat(drop(X))[0])
    assert all(torch.equal(value, before[name]) for name, value in drop.state_dict().items())
    assert all(one is other for one, other in zip(drop.layer._flat_weights, drop.layer.parameters(), strict=True))


def test_the_raw_weights_are_the_parameters():
    layer = nn.LSTM(3, 4)
    own = list(layer.parameters())
    drop = WeightDrop(layer, 0.5)
    drop(X)
    assert all(one is other for one, other in zip(drop.parameters(), own, strict=True))
    assert list(drop.state_dict()) == [f"layer.{name}" for name in layer.state_dict()]


def test_all_of_them_may_be_dropped_or_none():
    layer = nn.RNN(3, 4, batch_first=True)
    once, _ = WeightDrop(layer, 1.0)(X)
    assert torch.allclose(once, torch.tanh(X @ layer.weight_ih_l0.T + layer.bias_ih_l0 + layer.bias_hh_l0), atol=1e-6)
    assert torch.equal(WeightDrop(layer, 0)(X)[0], layer(X)[0])


def test_an_optimizer_step_after_a_copy_or_a_move_is_seen():
    drop = WeightDrop(nn.GRU(3, 4), 0.5)
    for twin in (copy.deepcopy(drop), drop.to(torch.float64)):
        x = X.to(next(twin.parameters()).dtype)
        before = twin.eval()(x)[0]
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
        twin.train()(x)[0].square().sum().backward()
        optimizer.step()
        assert not torch.equal(twin.eval()(x)[0], before)


def test_it_survives_being_saved_whole_and_by_weights():
    drop = WeightDrop(nn.LSTM(3, 4), 0.5).eval()
    file = io.BytesIO()
    torch.save(drop, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(X)[0], drop(X)[0])
    other = WeightDrop(nn.LSTM(3, 4), 0.5).eval()
    other.load_state_dict(drop.state_dict())
    assert torch.equal(other(X)[0], drop(X)[0])


def test_an_exception_leaves_the_layer_whole():
    drop = WeightDrop(nn.LSTM(3, 4), 0.5)
    with pytest.raises(RuntimeError):
        drop(torch.randn(2, 5, 99))
    assert torch.equal(drop.eval()(X)[0], drop.layer(X)[0])


def test_states_packed_input_and_flatten_parameters_go_through():
    drop = WeightDrop(nn.LSTM(3, 4), 0.5)
    drop.flatten_parameters()
    output, state = drop(pack_sequence([torch.randn(4, 3), torch.randn(2, 3)]))
    assert output.data.shape == (6, 4)
    assert drop(X[:, :2], hx=state)[0].shape == (2, 2, 4)


def test_what_the_layer_has_the_wrapper_has():
    drop = WeightDrop(nn.LSTM(3, 4, num_layers=2), 0.5)
    assert (drop.hidden_size, drop.num_layers, drop.weight_hh_l1.shape) == (4, 2, (16, 4))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = drop.nothing


def test_the_layer_inside_is_found_and_carried():
    model = nn.Sequential(nn.Linear(3, 3), WeightDrop(nn.LSTM(3, 4), 0.5))
    (layer,) = hs.layers(model)
    assert (layer.name, layer.kind) == ("1.layer", "lstm")
    with hs.Carry(model) as carry:
        model(X)
        assert carry.state["1.layer.h"].shape == (1, 5, 4)


@pytest.mark.parametrize(
    ("layer", "complaint"),
    [
        (nn.LSTMCell(3, 4), "this is LSTMCell.*once for a whole sequence"),
        (nn.Sequential(nn.LSTM(3, 4)), r"this is Sequential.*model.lstm = WeightDrop\(model.lstm, p\)"),
    ],
)
def test_what_has_no_fused_kernel_is_refused(layer, complaint):
    with pytest.raises(NotRecurrent, match=complaint):
        WeightDrop(layer, 0.5)


def test_what_is_no_probability_is_refused():
    with pytest.raises(BadInput, match="p is a probability from 0 to 1, but this is 2"):
        WeightDrop(nn.LSTM(3, 4), 2)


def test_it_shows_how_much_is_dropped():
    assert "p=0.25" in repr(WeightDrop(nn.LSTM(3, 4), 0.25))


@pytest.mark.cuda
@each_layer
def test_cudnn_runs_it_without_a_word(make):
    drop = WeightDrop(make(), 0.5).cuda()
    drop.flatten_parameters()
    flat(drop(X.cuda()))[0].sum().backward()
    assert all(weight.grad.isfinite().all() for weight in drop.parameters())


def flat(result):
    output, state = result
    return [output, *(state if isinstance(state, tuple) else [state])]
