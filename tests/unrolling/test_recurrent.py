"""`Recurrent` has nn.LSTM's shape of call and return, over any cell."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import hiddenstate as hs
from hiddenstate.errors import BadInput, StateMismatch
from tests.support.cells import CELLS, HIDDEN, INPUT, LayerNormLSTMCell, LearnedCell, NestedCell, ReadoutCell, TanhCell
from tests.support.equal import assert_same, inputs_of

TWINS = {"rnn": (nn.RNN, nn.RNNCell), "gru": (nn.GRU, nn.GRUCell), "lstm": (nn.LSTM, nn.LSTMCell)}
SETTINGS = [{}, {"num_layers": 3}, {"bidirectional": True}, {"num_layers": 2, "bidirectional": True}]


def twins(kind, **settings):
    layer, cell = TWINS[kind]
    theirs = layer(INPUT, HIDDEN, batch_first=True, **settings).double()
    ours = hs.Recurrent(cell, INPUT, HIDDEN, **settings).double()
    for name, inner in ours.named_children():
        for weight, parameter in inner.named_parameters():
            parameter.data = getattr(theirs, f"{weight}_{name}").data
    return theirs, ours


def pairs(theirs, ours):
    """The parameters of both, in one order."""
    return [
        (getattr(theirs, f"{weight}_{name}"), parameter)
        for name, inner in ours.named_children()
        for weight, parameter in inner.named_parameters()
    ]


def parts(native):
    return list(native) if isinstance(native, tuple) else [native]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", TWINS)
@pytest.mark.parametrize("form", ["batched", "unbatched", "packed", "packed sorted", "with state"])
def test_it_computes_what_torchs_layer_computes_for_torchs_cell(kind, settings, form):
    theirs, ours = twins(kind, **settings)
    x = torch.randn(3, 5, INPUT, dtype=torch.float64, requires_grad=True)
    state = None
    if form == "unbatched":
        x = torch.randn(5, INPUT, dtype=torch.float64, requires_grad=True)
    given = x
    if form.startswith("packed"):
        lengths = torch.tensor([5, 4, 2] if form == "packed sorted" else [2, 5, 4])
        given = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=form == "packed sorted")
    if form == "with state":
        state = hs.layers(theirs)[0].to_native(hs.layers(theirs)[0].initial(3).map(torch.randn_like))
    results, gradients = [], []
    for module, own in ((theirs, 0), (ours, 1)):
        out, final = module(given, state)
        if form.startswith("packed"):
            assert type(out) is type(given)
            out = pad_packed_sequence(out, batch_first=True)[0]
        results.append([out, *parts(final)])
        loss = sum((value * torch.arange(value.numel()).view_as(value).cos()).sum() for value in results[-1])
        gradients.append(
            torch.autograd.grad(loss, [x, *(pair[own] for pair in pairs(theirs, ours))], retain_graph=True)
        )
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", [name for name in CELLS if name not in {"tokens"} and "torch" not in name])
def test_any_cell_can_be_stacked(name, settings):
    kind = CELLS[name].kind
    stack = hs.Recurrent(kind, INPUT, HIDDEN, **settings).double()
    x = torch.randn(3, 5, INPUT, dtype=torch.float64)
    deep = settings.get("num_layers", 1) * (2 if settings.get("bidirectional") else 1)
    out, state = hs.unroll(stack, x, lengths=[5, 3, 4])
    assert out.shape == (3, 5, CELLS[name].output * (2 if settings.get("bidirectional") else 1))
    assert tuple(state) == CELLS[name].parts
    assert all(part.shape[0] == deep for part in state.values())
    assert state.batch == 3
    again, _ = hs.unroll(stack, x, state, lengths=[5, 3, 4])
    assert again.shape == out.shape
    native = stack(x)[1]
    torch.testing.assert_close(stack(x, native)[0], hs.unroll(stack, x, hs.unroll(stack, x)[1])[0])


def test_two_layers_are_one_after_the_other():
    stack, x = hs.Recurrent(ReadoutCell, INPUT, HIDDEN, num_layers=2).double(), torch.randn(2, 4, INPUT).double()
    assert stack.l1.input_size == ReadoutCell.output_size

    def by_hand():
        low, one = hs.unroll(stack.l0, x)
        high, two = hs.unroll(stack.l1, low)
        return [high, torch.stack([one["h"], two["h"]])]

    assert_same(by_hand, lambda: list(stack(x)), inputs_of(stack, x))


def test_the_state_is_nested_as_the_cells_own():
    (pair, slow) = hs.Recurrent(NestedCell, INPUT, HIDDEN, num_layers=2)(torch.randn(3, 5, INPUT))[1]
    assert [part.shape for part in (*pair, slow)] == [(2, 3, 4), (2, 3, 4), (2, 3, 2)]


def test_learned_first_states_are_used_and_learn():
    stack, x = hs.Recurrent(LearnedCell, INPUT, HIDDEN, num_layers=2), torch.randn(2, 3, INPUT)
    torch.testing.assert_close(stack(x)[0], hs.unroll(stack, x, hs.layers(stack)[0].initial(2))[0])
    stack(x)[0].sum().backward()
    assert all((cell.start.grad != 0).any() for cell in stack.cells())


def test_resets_in_a_stack_start_every_layer_anew():
    stack, x = hs.Recurrent(LearnedCell, INPUT, HIDDEN, num_layers=2), torch.randn(2, 5, INPUT)
    resets = torch.zeros(2, 5, dtype=torch.bool)
    resets[0, 2] = True
    out, _ = stack(x, resets=resets)
    torch.testing.assert_close(out[:1, 2:], stack(x[:1, 2:])[0])
    torch.testing.assert_close(out[1:], stack(x[1:])[0])


def test_resets_of_an_unbatched_sequence_may_be_unbatched():
    stack, x = hs.Recurrent(TanhCell, INPUT, HIDDEN), torch.randn(5, INPUT)
    resets = torch.tensor([False, False, True, False, False])
    torch.testing.assert_close(stack(x, resets=resets)[0][2:], stack(x[2:])[0])


def test_dropout_lies_between_layers_in_training_only():
    stack, x = hs.Recurrent(TanhCell, INPUT, HIDDEN, num_layers=2, dropout=0.5), torch.randn(2, 5, INPUT)
    low = hs.unroll(stack.l0, x)[0]
    torch.manual_seed(1)
    expected = hs.unroll(stack.l1, nn.functional.dropout(low, 0.5))[0]
    torch.manual_seed(1)
    torch.testing.assert_close(stack(x)[0], expected)
    stack.eval()
    torch.testing.assert_close(stack(x)[0], hs.unroll(stack.l1, low)[0])


def test_dropout_with_one_layer_is_warned_of():
    with pytest.warns(UserWarning, match=r"dropout=0\.5 is put between layers.*does nothing"):
        hs.Recurrent(TanhCell, INPUT, HIDDEN, dropout=0.5)


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(BadInput, match="num_layers is 0"):
        hs.Recurrent(TanhCell, INPUT, HIDDEN, num_layers=0)
    with pytest.raises(BadInput, match=r"dropout is 1\.5"):
        hs.Recurrent(TanhCell, INPUT, HIDDEN, num_layers=2, dropout=1.5)


def test_cells_get_their_own_settings():
    assert hs.Recurrent(nn.GRUCell, INPUT, HIDDEN, bias=False).l0.bias_ih is None


def test_it_is_found_as_one_layer_with_a_track_for_each_cell():
    model = nn.Sequential(hs.Recurrent(LayerNormLSTMCell, INPUT, HIDDEN, num_layers=2, bidirectional=True))
    (layer,) = hs.layers(model)
    assert (layer.name, layer.kind) == ("0", "recurrent")
    assert layer.tracks == ("0.l0", "0.l0_reverse", "0.l1", "0.l1_reverse")
    assert layer.spec.parts == ("h", "c")
    assert layer.initial(5)["c"].shape == (4, 5, HIDDEN)
    assert layer.rows((torch.zeros(5, 7, INPUT),), {}) == (5, True)
    assert layer.rows((torch.zeros(7, INPUT),), {}) == (1, False)


def test_it_prints_its_settings():
    shown = repr(hs.Recurrent(nn.GRUCell, 3, 4, num_layers=2, bidirectional=True, dropout=0.1))
    assert "3, 4, num_layers=2, dropout=0.1, bidirectional=True" in shown
    assert "(l1_reverse): GRUCell(8, 4)" in shown


def test_copies_pickles_and_state_dicts_are_whole():
    stack, x = hs.Recurrent(LearnedCell, INPUT, HIDDEN, num_layers=2), torch.randn(2, 3, INPUT)
    out = stack(x)[0]
    assert torch.equal(copy.deepcopy(stack)(x)[0], out)
    assert torch.equal(pickle.loads(pickle.dumps(stack))(x)[0], out)
    other = hs.Recurrent(LearnedCell, INPUT, HIDDEN, num_layers=2)
    buffer = io.BytesIO()
    torch.save(stack.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer))
    assert torch.equal(other(x)[0], out)
    assert stack.to(torch.float64)(x.double())[0].dtype == torch.float64


def test_hooks_on_the_stack_see_the_call_of_unroll():
    stack, seen = hs.Recurrent(TanhCell, INPUT, HIDDEN), []
    stack.register_forward_hook(lambda module, args, result: seen.append(result[0].shape))
    hs.unroll(stack, torch.randn(2, 3, INPUT))
    assert seen == [(2, 3, HIDDEN)]


def test_lengths_beside_a_packed_sequence_are_refused():
    packed = pack_padded_sequence(torch.randn(2, 3, INPUT), torch.tensor([3, 2]), batch_first=True)
    with pytest.raises(BadInput, match="has its lengths in it: leave lengths out"):
        hs.Recurrent(TanhCell, INPUT, HIDDEN)(packed, lengths=[3, 2])


def test_a_state_of_other_parts_is_refused():
    stack, x = hs.Recurrent(TanhCell, INPUT, HIDDEN), torch.randn(2, 3, INPUT)
    with pytest.raises(StateMismatch, match="the state has the parts h, c, but this Recurrent's cells have h"):
        stack(x, (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)))
    with pytest.raises(StateMismatch, match="no batch axis, so it is one row, but the state has 2"):
        hs.layers(stack)[0].to_native(hs.layers(stack)[0].initial(2), batched=False)


def test_tokens_run_through_a_stack_of_one():
    stack = hs.Recurrent(CELLS["tokens"].kind, 7, HIDDEN)
    tokens = torch.randint(7, (2, 5))
    assert stack(tokens)[0].shape == (2, 5, HIDDEN)
    torch.testing.assert_close(stack(tokens[0])[0], stack(tokens)[0][0])


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of what Dynamo does where a graph breaks
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_runs_its_stack_as_it_is(backend):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack, self.head = hs.Recurrent(TanhCell, INPUT, HIDDEN, num_layers=2), nn.Linear(HIDDEN, 2)

        def forward(self, x):
            return self.head(self.stack(x * 2)[0]) + hs.unroll(self.stack, x)[0].sum()

    model, x = Model(), torch.randn(3, 5, INPUT)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    torch.testing.assert_close(compiled(x), model(x))
    one, two = (torch.autograd.grad(m(x).cos().sum(), list(model.parameters())) for m in (compiled, model))
    torch.testing.assert_close(one, two)


def test_a_cell_in_place_of_its_class_is_refused_with_both_ways_out():
    with pytest.raises(BadInput, match=r"a GRUCell that is made already.*hs\.Recurrent\(GRUCell, .*hs\.unroll\(cell"):
        hs.Recurrent(nn.GRUCell(3, 4), 3, 4)


def test_a_cell_in_place_of_its_class_is_refused_also_without_sizes():
    make: Any = hs.Recurrent
    for args, kwargs in (((nn.LSTMCell(3, 4),), {}), ((), {"CellType": nn.LSTMCell(3, 4)})):
        with pytest.raises(BadInput, match=r"a LSTMCell that is made already.*hs\.Recurrent\(LSTMCell, .*hs\.unroll"):
            make(*args, **kwargs)
