"""Carry: the state of an unmodified model goes from batch to batch."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from hiddenstate.carry import Carry, Learned, Noise
from hiddenstate.cells import layers
from hiddenstate.errors import BadInput, CarryError, CarryWarning, NotRecurrent, StateMismatch
from hiddenstate.state import State, load
from hiddenstate.unrolling import unroll
from tests.support.cells import CELLS, PairCell
from tests.support.models import Chunked, Deep, Packed, Siamese, Stepping, TimeFirst, ZerosInside
from tests.support.untouched import untouched


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


MODELS = {
    "deep": Deep,
    "chunked": Chunked,
    "lstm cell": lambda: Stepping(nn.LSTMCell(3, 4)),
    "gru cell": lambda: Stepping(nn.GRUCell(3, 4)),
    "rnn cell": lambda: Stepping(nn.RNNCell(3, 4)),
    "compiled": lambda: torch.compile(Deep(), backend="eager"),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks there
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@given(cut=st.integers(1, 11))
def test_cutting_a_sequence_anywhere_changes_nothing(make, cut):
    model, x = make(), torch.randn(3, 12, 3)
    whole = model(x)
    with Carry(model):
        pieces = torch.cat([model(x[:, :cut]), model(x[:, cut:])], dim=1)
    torch.testing.assert_close(pieces, whole)


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("deep", [1, 2])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_that_is_the_model_itself_is_carried(kind, deep, batch_first, bias):
    layer = kind(3, 4, deep, batch_first=batch_first, bias=bias)
    x = torch.randn(5, 6, 3)
    whole, last = layer(x)
    axis = 1 if batch_first else 0
    with Carry(layer) as carry:
        pieces = [layer(piece)[0] for piece in x.split([1, 3, x.shape[axis] - 4], dim=axis)]
        assert carry.state is not None
        assert set(carry.state) == ({"h", "c"} if kind is nn.LSTM else {"h"})
        assert carry.state.batch == x.shape[1 - axis]
        torch.testing.assert_close(carry.state["h"], last[0] if kind is nn.LSTM else last)
    torch.testing.assert_close(torch.cat(pieces, dim=axis), whole)


def test_projected_and_relu_layers_are_carried():
    for layer in (nn.LSTM(3, 6, proj_size=2, batch_first=True), nn.RNN(3, 4, nonlinearity="relu", batch_first=True)):
        x = torch.randn(2, 8, 3)
        whole = layer(x)[0]
        with Carry(layer):
            pieces = [layer(piece)[0] for piece in x.split(3, dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), whole)


@pytest.mark.parametrize("layer", [nn.LSTM(3, 4, 2), nn.GRU(3, 4), nn.LSTMCell(3, 4), nn.GRUCell(3, 4)], ids=repr)
def test_unbatched_input_is_a_batch_of_one_row(layer):
    fused = isinstance(layer, nn.RNNBase)
    steps = [torch.randn(2, 3) if fused else torch.randn(3) for _ in range(3)]
    with Carry(layer) as carry:
        carried = [layer(step) for step in steps][-1]
        assert carry.state.batch == 1
    state = None
    for step in steps:
        result = layer(step, state)
        state = result[1] if fused else result
    torch.testing.assert_close(carried, result)


def test_packed_input_is_carried_row_by_row():
    model, x, lengths = Packed(), torch.randn(5, 3, 3), torch.tensor([2, 5, 3])
    packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
    with Carry(model) as carry:
        model(packed)
        again, _ = pad_packed_sequence(model(packed))
        state = carry.state["gru.h"]
    for row, length in enumerate(lengths):
        twice = torch.cat([x[:length, row], x[:length, row]])
        expected, last = model.gru(twice)
        torch.testing.assert_close(again[:length, row], expected[length:])
        torch.testing.assert_close(state[:, row], last)


# A module that merely wraps a known cell is not the layer; the one inside it is, and gets its state from the wrapper.
STEPPED = {name: sample for name, sample in CELLS.items() if layers(cell := sample.cell())[0].module is cell}


@pytest.mark.parametrize("sample", STEPPED.values(), ids=STEPPED)
def test_every_kind_of_cell_is_carried_step_by_step(sample):
    cell, x = sample.cell(), sample.x(batch=3, steps=4)
    carried = []
    with Carry(cell) as carry, torch.no_grad():
        for x_t in x.unbind(1):
            # A cell that insists on its state gets it from the carry.
            carried.append(cell(x_t))
        assert carry.state.batch == 3
    expected, _ = unroll(cell, x, engine="loop")
    result = carried[-1]
    flat = [result] if torch.is_tensor(result) else list(_tensors(result))
    assert any(part.shape == expected[:, -1].shape and torch.allclose(part, expected[:, -1]) for part in flat)


def _tensors(thing):
    if torch.is_tensor(thing):
        yield thing
    else:
        for inner in thing.values() if isinstance(thing, dict) else thing:
            yield from _tensors(inner)


def test_the_state_is_detached_and_gradients_stay_within_a_batch():
    model, x = Deep(), torch.randn(3, 8, 3)
    with Carry(model) as carry:
        first = x[:, :4].clone().requires_grad_()
        model(first)
        assert not any(part.requires_grad for part in carry.state.values())
        model(x[:, 4:]).sum().backward()
        assert first.grad is None


def test_a_given_state_is_used_and_what_the_layer_returns_is_kept():
    layer, x = nn.GRU(3, 4, batch_first=True), torch.randn(2, 5, 3)
    h = torch.randn(1, 2, 4)
    expected, last = layer(x, h)
    with Carry(layer) as carry:
        layer(x)
        out, _ = layer(x, h)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(carry.state["h"], last)
        torch.testing.assert_close(layer(x)[0], layer.forward(x, last)[0])


@given(rows=st.lists(st.integers(0, 3), unique=True, max_size=4), as_mask=st.booleans())
def test_reset_rows_start_anew_and_the_others_go_on(rows, as_mask):
    model, x = Deep(), torch.randn(4, 6, 3)
    fresh = model(x)
    mask = torch.zeros(4, dtype=torch.bool)
    mask[rows] = True
    with Carry(model) as carry:
        model(x)
        on = copy.deepcopy(carry.state_dict())
        carry.reset(mask if as_mask else rows)
        mixed = model(x)
        carry.load_state_dict(on)
        going_on = model(x)
    torch.testing.assert_close(mixed, torch.where(mask[:, None, None], fresh, going_on))


def test_a_reset_shows_in_the_state_at_once():
    model = Deep()
    with Carry(model) as carry:
        model(torch.randn(3, 4, 3))
        carry.reset([1])
        assert carry.state["gru.h"][:, 1].abs().sum() == 0
        assert carry.state["gru.h"][:, 0].abs().sum() > 0


def test_after_a_full_reset_another_batch_size_is_welcome():
    model = Deep()
    with Carry(model) as carry:
        model(torch.randn(3, 4, 3))
        carry.reset()
        assert carry.state is None
        x = torch.randn(5, 4, 3)
        with_carry = model(x)
    torch.testing.assert_close(with_carry, model(x))


def test_resetting_rows_before_the_first_batch_changes_nothing():
    model, x = Deep(), torch.randn(3, 4, 3)
    with Carry(model) as carry:
        carry.reset([0])
        out = model(x)
    torch.testing.assert_close(out, model(x))


def test_an_integer_mask_is_refused_in_a_reset_and_nothing_is_lost():
    model = Deep()
    with Carry(model) as carry:
        model(torch.randn(4, 5, 3))
        before = carry.state["gru.h"]
        with pytest.raises(StateMismatch, match=r"4 integers, all 0 or 1.*a mask was meant"):
            carry.reset(torch.tensor([0, 1, 0, 1]))
        with pytest.raises(StateMismatch, match=r"mask has 3 entries.*state has 4 rows"):
            carry.reset(torch.tensor([True, False, True]))
        with pytest.raises(StateMismatch, match=r"row 7"):
            carry.reset([7])
        assert torch.equal(carry.state["gru.h"], before)


def test_a_batch_of_another_size_is_refused_with_a_way_out_and_nothing_is_lost():
    model, x = Deep(), torch.randn(8, 5, 3)
    with Carry(model) as carry:
        model(x)
        before = dict(carry.state)
        with pytest.raises(StateMismatch, match=r"input has 3 rows.* has 8.*drop_last=True.*rows='first'"):
            model(x[:3])
        with pytest.raises(StateMismatch, match=r"input has 16 rows.* has 8.*carry\.reset\(\)"):
            model(torch.cat([x, x]))
        assert all(torch.equal(part, before[name]) for name, part in carry.state.items())


@given(few=st.integers(1, 5))
def test_with_rows_first_the_others_wait(few):
    model, x = Deep(), torch.randn(5, 6, 3)
    with Carry(model, rows="first") as carry:
        model(x)
        model(x[:few])
        pieces = model(x)
    for row in range(5):
        fed = torch.cat([x[row : row + 1]] * (3 if row < few else 2), dim=1)
        torch.testing.assert_close(pieces[row : row + 1], model(fed)[:, -6:])
    with Carry(model, rows="first") as carry:
        model(x)
        with pytest.raises(StateMismatch, match=r"6 rows.* has 5"):
            model(torch.randn(6, 6, 3))
        assert carry.state.batch == 5


def test_a_waiting_row_that_was_reset_still_starts_anew():
    model, x = Deep(), torch.randn(3, 4, 3)
    with Carry(model, rows="first") as carry:
        model(x)
        carry.reset([0, 2])
        model(x[:2])
        out = model(x)
    torch.testing.assert_close(out[2:], model(x[2:]))


def test_fresh_keeps_validation_and_training_apart():
    model, x = Deep(), torch.randn(4, 6, 3)
    other = torch.randn(2, 6, 3)
    expected = model(torch.cat([other, other], dim=1))
    with Carry(model) as carry:
        model(x)
        before = carry.state
        with carry.fresh():
            assert carry.state is None
            out = torch.cat([model(other), model(other)], dim=1)
        torch.testing.assert_close(out, expected)
        assert all(torch.equal(carry.state[name], before[name]) for name in before)
        with pytest.raises(RuntimeError), carry.fresh():
            model(torch.randn(2, 6, 99))
        assert all(torch.equal(carry.state[name], before[name]) for name in before)


def test_a_model_that_fails_midway_keeps_the_last_state_of_all_its_layers():
    class Failing(Deep):
        fail = False

        def forward(self, x):
            y, _ = self.encoder["lstm"](self.embed(x))
            if self.fail:
                raise ArithmeticError("between the layers")
            return self.head(self.gru(y)[0])

    model, x = Failing(), torch.randn(2, 4, 3)
    whole = model(torch.cat([x, x], dim=1))
    with Carry(model):
        model(x)
        model.fail = True
        with pytest.raises(ArithmeticError):
            model(x)
        model.fail = False
        torch.testing.assert_close(model(x), whole[:, 4:])


def test_a_checkpoint_resumes_to_the_bit():
    model, x = Deep(), torch.randn(3, 5, 3)
    learned = Learned(model, std=0.5)
    with Carry(model, init=learned) as carry:
        model(x)
        carry.reset([1])
        file = io.BytesIO()
        torch.save(carry.state_dict(), file)
        expected = model(x)
        expected.sum().backward()
        grads = [row.grad.clone() for row in learned.parameters()]
    twin, its_learned = copy.deepcopy((model, learned))
    its_learned.zero_grad()
    file.seek(0)
    with Carry(twin, init=its_learned) as carry:
        carry.load_state_dict(torch.load(file, weights_only=True))
        out = twin(x)
        out.sum().backward()
    assert torch.equal(out, expected)
    assert all(torch.equal(row.grad, grad) for row, grad in zip(its_learned.parameters(), grads, strict=True))


def test_a_checkpoint_of_another_model_is_refused():
    model = nn.Sequential(nn.GRU(3, 4))
    with Carry(model) as carry:
        model(torch.randn(2, 3, 3))
        content = carry.state_dict()
    with Carry(Deep()) as other:
        with pytest.raises(StateMismatch, match=r"carries the layers 0, but this model has encoder\.lstm, gru"):
            other.load_state_dict(content)
        with pytest.raises(StateMismatch, match=r"no state_dict of a Carry: it lacks anew, axes, states"):
            other.load_state_dict({})


def test_the_state_can_be_saved_and_assigned(tmp_path):
    model, x = Deep(), torch.randn(3, 5, 3)
    with Carry(model) as carry:
        model(x)
        carry.state.save(tmp_path / "state.safetensors")
        expected = model(x)
        carry.reset()
        carry.state = load(tmp_path / "state.safetensors")
        assert torch.equal(model(x), expected)
        carry.state = None
        assert carry.state is None


def test_a_state_that_does_not_fit_is_refused_when_assigned():
    model = Deep()
    with Carry(model) as carry:
        model(torch.randn(3, 5, 3))
        good = dict(carry.state)
        before = carry.state["gru.h"]
        for change, message in [
            ({"gru.h": torch.zeros(1, 3, 9)}, r"'h' has shape \(1, 3, 9\).*GRU needs \(1, batch, 4\)"),
            ({"encoder.lstm.c": torch.zeros(1, 3, 5)}, r"'c' has shape \(1, 3, 5\).*needs \(2, batch, 5\): 2 layers"),
            ({"other.h": torch.zeros(1, 3, 5)}, r"4 parts.*take 3 of them"),
            ({"gru.h": torch.zeros(1, 3, 4, dtype=torch.float64)}, r"gru.*float64.*float32"),
        ]:
            with pytest.raises(StateMismatch, match=message):
                carry.state = State({**good, **change}, batch_axis=1)
        with pytest.raises(StateMismatch, match=r"none for the layer 'encoder.lstm'"):
            carry.state = State({"gru.h": good["gru.h"]}, batch_axis=1)
        with pytest.raises(StateMismatch, match=r"this is tuple, and there are 2 layers"):
            carry.state = (1, 2)
        assert torch.equal(carry.state["gru.h"], before)


def test_gradient_reaches_a_learned_initial_state_at_the_start_and_after_a_reset():
    model, x = Deep(), torch.randn(3, 5, 3)
    learned = Learned(model, std=0.1)
    with Carry(model, init=learned) as carry:
        model(x).sum().backward()
        assert all(row.grad.abs().sum() > 0 for row in learned.parameters())
        learned.zero_grad()
        model(x).sum().backward()
        assert all(row.grad is None for row in learned.parameters())
        carry.reset([2])
        out = model(x)
        out[:2].sum().backward(retain_graph=True)
        assert all(row.grad is None or row.grad.abs().sum() == 0 for row in learned.parameters())
        out[2].sum().backward()
        assert all(row.grad.abs().sum() > 0 for row in learned.parameters())


def test_a_reset_row_starts_from_the_learned_state_as_it_is_now():
    layer, x = nn.GRU(3, 4, batch_first=True), torch.randn(2, 5, 3)
    learned = Learned(layer)
    with Carry(layer, init=learned) as carry:
        layer(x)
        carry.reset([0])
        with torch.no_grad():
            learned.rows["h"].fill_(0.7)
        out, _ = layer(x)
    expected, _ = layer(x, torch.full((1, 2, 4), 0.7))
    torch.testing.assert_close(out[0], expected[0])


def test_noise_starts_every_sequence_elsewhere_and_a_function_makes_its_own_state():
    layer, x = nn.GRU(3, 4, batch_first=True), torch.randn(2, 5, 3)
    with Carry(layer, init=Noise(0.5)) as carry:
        one, _ = layer(x)
        carry.reset()
        two, _ = layer(x)
        assert not torch.allclose(one, two)
    start = torch.randn(1, 2, 4)
    model = nn.Sequential(layer)
    for name in ("0.h", "h"):  # a model of one layer may leave its name out
        with Carry(model, init=lambda batch, name=name: State({name: start[:, :batch]}, batch_axis=1)):
            torch.testing.assert_close(model(x)[0], layer.forward(x, start)[0])


def test_an_initial_state_that_does_not_fit_is_refused():
    layer, x = nn.GRU(3, 4, batch_first=True), torch.randn(2, 5, 3)
    for init, message in [
        (lambda batch: torch.zeros(1, batch, 4), r"init returned Tensor, but a State is needed"),
        (lambda batch: State({"h": torch.zeros(1, 3, 4)}, 1), r"init\(2\) returned a state of 3 rows"),
        (lambda batch: State({"h": torch.zeros(2, 2, 4)}, 1), r"\(2, 2, 4\).*needs \(1, batch, 4\)"),
    ]:
        with Carry(layer, init=init), pytest.raises(StateMismatch, match=message):
            layer(x)
    with pytest.raises(BadInput, match=r"init is 'ones', but it is 'zeros', an hs\.Learned"):
        Carry(layer, init="ones")
    with pytest.raises(BadInput, match=r"standard deviation of -1"):
        Noise(-1)


def test_of_both_directions_the_forward_one_is_carried_and_it_says_so():
    layer, x = nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True), torch.randn(2, 6, 3)
    with pytest.warns(CarryWarning, match=r"forward direction is carried.*reverse direction starts anew"):
        carry = Carry(layer)
    with carry:
        _, (h, c) = layer(x)
        out, _ = layer(x)
    keep = torch.tensor([1.0, 0, 1, 0]).view(4, 1, 1)
    expected, _ = layer(x, (h * keep, c * keep))
    torch.testing.assert_close(out, expected)


def test_a_layer_called_twice_without_a_state_is_an_error_that_names_it():
    model = Siamese()
    with Carry(model) as carry:
        with pytest.raises(CarryError, match=r"'tower' is called twice in one call of the model.*without a state"):
            model(torch.randn(2, 3, 3), torch.randn(2, 3, 3))
        assert carry.state is None


def test_a_model_that_hands_its_layer_zeros_is_told_once():
    model, x = ZerosInside(), torch.randn(2, 4, 3)
    with Carry(model):
        model(x)
        with pytest.warns(CarryWarning, match=r"'lstm' is handed a state of zeros by the model itself"):
            model(x)
        model(x)


def test_a_state_that_holds_a_used_up_graph_is_refused_by_name():
    model, x = Deep(), torch.randn(2, 4, 3)
    with Carry(model, detach=False) as carry:
        model(x).sum().backward()
        with pytest.raises(CarryError, match=r"'encoder.lstm' still holds the graph of an earlier batch.*detach=True"):
            model(x)
        carry.state = carry.state.detach()
        model(x).sum().backward()


def test_without_detach_gradients_go_back_through_batches():
    model, x = Deep().double(), torch.randn(2, 8, 3, dtype=torch.float64)
    first = x[:, :4].clone().requires_grad_()
    whole = x.clone().requires_grad_()
    model(whole)[:, 4:].sum().backward()
    with Carry(model, detach=False):
        model(first)
        model(x[:, 4:]).sum().backward()
    torch.testing.assert_close(first.grad, whole.grad[:, :4])


def with_checkpoints(reentrant: bool) -> tuple[Deep, Deep]:
    """A model, and the same one with its activations computed again in the backward."""

    class Checkpointed(Deep):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    plain, model = Deep().double(), Checkpointed().double()
    plain.load_state_dict(model.state_dict())
    return plain, model


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_recomputes_with_the_state_of_that_call(reentrant):
    plain, model = with_checkpoints(reentrant)
    x = torch.randn(2, 8, 3, dtype=torch.float64, requires_grad=True)
    for net in (plain, model):
        with Carry(net) as carry:
            for piece in x.split(4, dim=1):
                net(piece).square().sum().backward()
            net.last = carry.state
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, parameter.grad)
    assert all(torch.equal(model.last[name], plain.last[name]) for name in plain.last)


@pytest.mark.parametrize("make", [Deep, lambda: Stepping(nn.LSTMCell(3, 4)), lambda: Stepping(nn.RNNCell(3, 4))])
def test_under_autocast_the_state_is_kept_in_the_precision_of_the_weights(make):
    model, x = make(), torch.randn(2, 6, 3)
    with Carry(model) as carry:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(x)
            model(x)
        assert all(part.dtype == torch.float32 for part in carry.state.values())
        model(x)


def test_a_state_made_in_inference_mode_can_be_trained_on():
    model, x = Deep(), torch.randn(2, 4, 3)
    with Carry(model):
        with torch.inference_mode():
            model(x)
            model(x)
        out = model(x)
        out.sum().backward()
    torch.testing.assert_close(out, model(torch.cat([x, x, x], dim=1))[:, -4:])
    assert all(parameter.grad.any() for parameter in model.parameters())


def test_gradient_accumulation_over_pieces_equals_one_loss_over_them():
    model, x = Deep().double(), torch.randn(2, 9, 3, dtype=torch.float64)
    with Carry(model):
        for piece in x.split(3, dim=1):
            model(piece).square().sum().backward()
    accumulated = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with Carry(model):
        sum(model(piece).square().sum() for piece in x.split(3, dim=1)).backward()
    for parameter, grad in zip(model.parameters(), accumulated, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_micro_batches_of_different_rows_keep_a_state_each():
    model, x = Deep(), torch.randn(4, 8, 3)
    whole = model(x)
    states = [None, None]
    outs = [[], []]
    with Carry(model) as carry:
        for piece in x.split(4, dim=1):
            for half in range(2):
                carry.state = states[half]
                outs[half].append(model(piece[2 * half : 2 * half + 2]))
                states[half] = carry.state
    torch.testing.assert_close(torch.cat([torch.cat(out, dim=1) for out in outs]), whole)


def test_closing_leaves_nothing_behind_also_after_an_exception():
    model, x = Deep(), torch.randn(2, 4, 3)
    expected = model(x)
    keys = [set(vars(module)) for module in model.modules()]
    with pytest.raises(RuntimeError), Carry(model):
        model(torch.cat([model(x)] * 9, dim=-1))
    assert hooks_of(model) == 0
    assert [set(vars(module)) for module in model.modules()] == keys
    assert torch.equal(model(x), expected)


def test_copies_and_pickles_of_a_model_are_not_carried():
    model, x = Deep(), torch.randn(2, 4, 3)
    expected = model(x)
    with Carry(model):
        model(x)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert torch.equal(twin(x), expected)
            assert torch.equal(twin(x), expected)


def test_two_carries_on_one_layer_are_refused_and_the_first_can_be_found():
    model = Deep()
    with Carry(model) as carry:
        with pytest.raises(CarryError, match=r"'encoder.lstm' is carried by another Carry.*hs\.Carry\.of\(model\)"):
            Carry(model)
        assert Carry.of(model) is carry
    assert Carry.of(model) is None
    Carry(model).close()


def test_bad_arguments_are_refused():
    with pytest.raises(NotRecurrent, match=r"Linear has no recurrent layer that is known.*hs\.register"):
        Carry(nn.Linear(2, 2))
    with pytest.raises(BadInput, match=r"rows is 'last', but it is 'strict'.*or 'first'"):
        Carry(Deep(), rows="last")
    with pytest.raises(CarryError, match=r"nn\.DataParallel copies the model.*DistributedDataParallel"):
        Carry(nn.DataParallel(Deep()))


def test_time_first_models_count_their_rows_along_the_second_axis():
    model, x = TimeFirst(), torch.randn(7, 3, 3)
    whole, _ = model(x)
    with Carry(model) as carry:
        pieces = torch.cat([model(x[:2])[0], model(x[2:])[0]])
        assert carry.state.batch == 3
    torch.testing.assert_close(pieces, whole)


def test_layers_called_outside_the_model_are_carried_too():
    model, x = Deep(), torch.randn(2, 6, 5)
    whole, _ = model.gru(x)
    with Carry(model) as carry:
        first, _ = model.gru(x[:, :2])
        second, _ = model.gru(x[:, 2:])
        assert set(carry.state) == {"gru.h"}
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)


def test_it_reads_well():
    model = Deep()
    with Carry(model) as carry:
        assert repr(carry) == "Carry(encoder.lstm, gru; nothing kept yet)"
        model(torch.randn(3, 2, 3))
        assert repr(carry) == "Carry(encoder.lstm, gru; 3 rows)"


def test_in_a_notebook_it_is_a_table_of_what_is_kept():
    model = Deep()
    with Carry(model) as carry:
        assert carry._repr_html_().count("<td>nothing yet</td>") == 2
        model(torch.randn(3, 2, 3))
        carry.reset([0, 2])
        shown = carry._repr_html_()
    assert "<b>Carry</b> 3 rows" in shown
    assert f"<th>gru</th><td>gru</td><td>h {tuple(carry.state['gru.h'].shape)}</td>" in shown
    assert shown.count("<td>2 rows start anew at the next call</td>") == 2


@pytest.mark.slow
def test_a_compiled_model_is_carried_also_when_it_was_compiled_before():
    model, x = Stepping(PairCellOrNone()), torch.randn(2, 6, 3)
    whole = model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(model, backend="aot_eager")
        torch.testing.assert_close(compiled(x), whole)
        with Carry(compiled) as carry:
            pieces = torch.cat([compiled(x[:, :3]), compiled(x[:, 3:])], dim=1)
            assert carry.state.batch == 2
            torch.testing.assert_close(pieces, whole)
        torch.testing.assert_close(compiled(x), whole)


class PairCellOrNone(PairCell):
    """A cell that makes its own first state."""

    def forward(self, x, state=None):
        if state is None:
            state = (x.new_zeros(x.shape[0], self.hidden_size),) * 2
        return super().forward(x, state)


def test_states_of_other_rows_are_exchanged_in_one_go():
    model = Deep().eval()
    x = torch.randn(3, 6, 3)
    with torch.no_grad():
        whole = model(x)
        with Carry(model) as carry:
            assert carry.exchange({}) == {}
            model(x[:, :4])
            held = carry.exchange({})
            assert sorted(held) == ["encoder.lstm", "gru"]
            model(torch.randn(5, 2, 3))  # other rows meanwhile
            carry.mark(lengths=[1, 1])
            carry.exchange({name: state.select([2, 0]) for name, state in held.items()})
            torch.testing.assert_close(model(x[[2, 0], 4:]), whole[[2, 0], 4:])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks there
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("make", [Deep, lambda: Stepping(nn.GRUCell(3, 4))], ids=["fused", "cell"])
def test_a_compiled_model_that_ran_before_is_carried_while_a_carry_is_there(make, backend):
    torch._dynamo.reset()
    model, x = make(), torch.randn(2, 6, 3)
    whole = model(x)
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):  # of one shape: nothing but the hooks gives a reason to compile anew
        alone = [compiled(piece) for piece in x.split(3, dim=1)]
        with untouched(model), Carry(compiled):
            pieces = [compiled(piece) for piece in x.split(3, dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), whole)
        torch.testing.assert_close(alone[1], model(x[:, 3:]))
        assert not torch.allclose(alone[1], pieces[1])


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize(
    "call",
    [
        lambda layer, x: layer(x),
        lambda layer, x: layer(input=x),
        lambda layer, x: layer(x, None),
        lambda layer, x: layer(hx=None, input=x),
        lambda layer, x: layer.forward(x),
        lambda layer, x: layer.forward(hx=None, input=x),
        lambda layer, x: checkpoint(layer, x, use_reentrant=False),
        lambda layer, x: checkpoint(layer, x, use_reentrant=True),
    ],
)
def test_however_a_layer_is_called_pieces_equal_the_whole_and_marks_hold(kind, call):
    layer = kind(3, 4, batch_first=True)
    x = torch.randn(2, 8, 3, requires_grad=True)
    whole, _ = layer(x)
    with Carry(layer) as carry:
        pieces = torch.cat([call(layer, x[:, :3])[0], call(layer, x[:, 3:])[0]], dim=1)
        torch.testing.assert_close(pieces, whole)
        carry.reset()
        carry.mark(lengths=torch.tensor([8, 5]))
        call(layer, x)
        kept = carry.state["h"][:, 1]
    torch.testing.assert_close(kept, first_part(layer(x[1:, :5])[1])[:, 0])


def first_part(native):
    return native if isinstance(native, torch.Tensor) else native[0]


@pytest.mark.parametrize("reentrant", [True, False])
def test_several_calls_before_one_backward_are_each_recomputed_with_their_own_state(reentrant):
    plain, model = with_checkpoints(reentrant)
    x = torch.randn(2, 8, 3, dtype=torch.float64, requires_grad=True)
    for net in (plain, model):
        with Carry(net):
            sum(net(piece).square().sum() for piece in x.split(4, dim=1)).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, parameter.grad)


@pytest.mark.parametrize("reentrant", [True, False])
def test_where_a_recomputed_call_cannot_be_told_from_another_it_is_refused(reentrant):
    class Checkpointed(Deep):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    model, x = Checkpointed(), torch.randn(2, 4, 3, requires_grad=True)
    with Carry(model):
        loss = model(x).sum() + model(x).sum()  # the same input twice, from two states
        with pytest.raises(CarryError, match=r"'encoder.lstm' runs once more within a backward pass.*after each call"):
            loss.backward()


def test_a_layer_that_the_first_call_does_not_reach_is_named():
    class Choosing(Deep):
        def forward(self, x):
            return self.encoder["lstm"](self.embed(x))[0]

    model, x = Choosing(), torch.randn(2, 4, 3)
    with Carry(model):
        with pytest.warns(CarryWarning, match=r"'gru' was found in the model, but not called in its first call"):
            model(x)
        model(x)  # once is enough


def test_layers_with_rows_of_their_own_show_in_one_state(tmp_path):
    class Hierarchical(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.GRU(3, 4, batch_first=True)
            self.sentences = nn.LSTM(4, 5, batch_first=True)

        def forward(self, x):
            _, h = self.words(x.flatten(0, 1))
            return self.sentences(h[0].view(*x.shape[:2], 4))[0]

    model, x = Hierarchical(), torch.randn(2, 6, 5, 3)
    with Carry(model) as carry:
        model(x)
        state = carry.state
        assert {name: part.shape[1] for name, part in state.items()} == {
            "words.h": 12,
            "sentences.h": 2,
            "sentences.c": 2,
        }
        assert repr(carry) == "Carry(words, sentences; 12 and 2 rows)"
        with pytest.raises(StateMismatch, match=r"different numbers of rows \(words.h 12, sentences.h 2.*one layer"):
            _ = state.batch
        state.save(tmp_path / "state")
        expected = model(x)
        carry.state = load(tmp_path / "state")
        torch.testing.assert_close(model(x), expected)


def test_messages_about_one_of_several_layers_name_it():
    model = Deep()
    with Carry(model) as carry:
        model(torch.randn(2, 4, 3))
        good = carry.state
        parts = {**good, "encoder.lstm.c": torch.zeros(2, 2, 9)}
        with pytest.raises(StateMismatch, match=r"at the layer 'encoder.lstm': part 'c' has shape \(2, 2, 9\)"):
            carry.state = State(parts, good.batch_axis)


def test_exporting_a_carried_model_is_refused():
    model = Deep()
    with Carry(model), pytest.raises(Exception, match=r"bake the state that is carried just now"):
        torch.export.export(model, (torch.randn(2, 4, 3),))


def test_a_submodule_that_is_called_is_carried_as_the_model_is():
    class Lightning(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Deep()

    model, x = Lightning(), torch.randn(2, 8, 3)
    whole = model.net(x)
    with Carry(model) as carry:
        pieces = torch.cat([model.net(x[:, :3]), model.net.forward(x[:, 3:])], dim=1)
        torch.testing.assert_close(pieces, whole)
        assert set(carry.state) == {"net.encoder.lstm.h", "net.encoder.lstm.c", "net.gru.h"}


def test_what_another_rank_carried_is_refused(monkeypatch):
    model, ranks = Deep(), iter([0, 1, 1])
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: next(ranks))
    with Carry(model) as carry:
        model(torch.randn(2, 4, 3))
        first, second = carry.state_dict(), carry.state_dict()
        with pytest.raises(StateMismatch, match=r"what rank 0 carried, but here is rank 1.*a name of its own"):
            carry.load_state_dict(first)
    assert second["rank"] == 1


class Loop(nn.Module):
    """A loop without any module that is the step."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(7, 4)

    def forward(self, x):
        memory = x.new_zeros(len(x), 4)
        for step in x.unbind(1):
            memory = torch.tanh(self.mix(torch.cat([step, memory], dim=-1)))
        return memory


def test_what_recurs_without_being_carried_is_named_once():
    model, x = Loop(), torch.randn(2, 6, 3)
    expected = model(x)
    with Carry(model) as carry:
        with pytest.warns(CarryWarning, match=r"not carried: memory of the loop at test_carry.py:\d+, whose start is"):
            assert torch.equal(model(x), expected)
        assert torch.equal(model(x), expected)
        assert carry.state is None


def test_a_model_in_which_nothing_recurs_is_refused_when_it_is_called():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x):
            return self.fc(x)

    model = Plain()
    with (
        Carry(model),
        pytest.raises(NotRecurrent, match=r"Plain has no recurrent layer.*nothing that was seen"),
    ):
        model(torch.randn(2, 4, 3))
    assert set(vars(model)) == set(vars(Plain()))


class Odd(nn.Module):
    """A cell that bears none of the names of one."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(7, 4)

    def forward(self, signal, past=None):
        past = signal.new_zeros(len(signal), 4) if past is None else past
        return torch.tanh(self.mix(torch.cat([signal, past], dim=-1)))


def test_a_cell_that_only_its_behavior_shows_is_carried():
    model = Stepping(Odd())
    x = torch.randn(2, 12, 3)
    assert not layers(model)
    whole = model(x)
    with Carry(model) as carry:
        torch.testing.assert_close(torch.cat([model(x[:, :5]), model(x[:, 5:])], dim=1), whole)
        assert [part.shape for part in carry.state.values()] == [(2, 4)]
        carry.reset([0])
        out = model(x)
    torch.testing.assert_close(out[:1], model(x[:1]))


def test_a_model_that_is_fed_step_by_step_is_watched_a_few_times_and_no_more(monkeypatch):
    from hiddenstate.carry import examination

    looks, real = [], examination.watched
    monkeypatch.setattr(examination, "watched", lambda *args, **kwargs: (looks.append(1), real(*args, **kwargs))[1])
    model, x = Loop(), torch.randn(2, 1, 3)
    with warnings.catch_warnings(), Carry(model):
        warnings.simplefilter("ignore", CarryWarning)
        for _ in range(8):
            model(x)
        seats = len(model.__dict__["forward"].seats)
    assert len(looks) <= 3
    assert seats == 1


class WordsInSentences(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.sentences = nn.GRU(3, 4, batch_first=True), nn.GRU(4, 5, batch_first=True)

    def forward(self, x):  # (document, sentence, word, feature)
        _, h = self.words(x.flatten(0, 1))
        return self.sentences(h[0].view(*x.shape[:2], 4))[0]


@pytest.mark.parametrize(
    "use",
    [
        lambda model, carry, x: carry.reset([1]),
        lambda model, carry, x: carry.reset(torch.tensor([False, True])),
        lambda model, carry, x: carry.reset(torch.zeros(6, dtype=torch.bool)),
        lambda model, carry, x: carry.mark(starts=torch.zeros(2, 3, dtype=torch.bool)),
        lambda model, carry, x: model(x[:1]),
        lambda model, carry, x: model(x[:, :2]),
    ],
)
@pytest.mark.parametrize("rows", ["strict", "first"])
def test_single_rows_are_refused_where_layers_have_different_numbers_of_them(use, rows):
    model, x = WordsInSentences(), torch.randn(2, 3, 4, 3)
    message = r"different numbers of rows \(words 6, sentences 2\).*carry\.reset\(\).*get_submodule\('words'\)"
    with Carry(model, rows=rows) as carry:
        model(x)
        before = carry.state
        with pytest.raises(StateMismatch, match=message):
            use(model, carry, x)
        torch.testing.assert_close(dict(carry.state), dict(before))
    with Carry(model.sentences) as carry:  # the way out
        model(x)
        h = carry.state["h"]
        carry.reset([1])
        assert torch.equal(carry.state["h"], torch.stack([h[:, 0], torch.zeros_like(h[:, 1])], dim=1))


@pytest.mark.parametrize("rows", ["strict", "first"])
def test_marks_of_other_rows_than_a_layer_runs_say_what_they_speak_of(rows):
    model, x = WordsInSentences(), torch.randn(2, 3, 4, 3)
    with Carry(model, rows=rows) as carry:
        carry.mark(lengths=torch.tensor([3, 2]))
        message = (
            r"told of 2 rows, but the layer 'words' is called with 6 rows\. Marks speak of rows that all layers share"
        )
        with pytest.raises(StateMismatch, match=message):
            model(x)


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * gradient + 0 * x


LAST_STEPS = {
    "product": lambda h: h @ torch.ones(4, 4),
    "function of one's own": OwnFunction.apply,
    "list": lambda h: torch.stack([h, h]).norm(dim=0),
    "saved list": lambda h: torch.einsum("abc,abc->abc", h, h),
    "index": lambda h: h[:, torch.tensor([1, 0])],
    "checkpoint": lambda h: checkpoint(torch.tanh, h, use_reentrant=False),
    "nothing saved": lambda h: h + 1,
    "loop": lambda h: torch.tanh(torch.relu(h) + 1).clone(),
}


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU])
@pytest.mark.parametrize("last", LAST_STEPS.values(), ids=LAST_STEPS)
@pytest.mark.parametrize("retain", [True, False])
def test_whatever_made_a_carried_state_a_used_up_graph_is_refused_and_a_fresh_one_is_not(kind, last, retain):
    class Changed(kind):
        def forward(self, x, hx=None):
            out, h = super().forward(x, hx)
            return out, last(h)

    model, x = Changed(3, 4, batch_first=True), torch.randn(2, 5, 3)
    with Carry(model, detach=False) as carry:
        model(x)
        model(x)[1].sum().backward(retain_graph=True)
        model(x)  # nothing was freed
        carry.state["h"].sum().backward(retain_graph=retain)
        if retain:
            model(x)
        else:
            with pytest.raises(CarryError, match=r"still holds the graph of an earlier batch.*carry\.state\.detach"):
                model(x)


class Nodes(nn.Module):
    """A graph's nodes are rows of its cell, one for each node of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        samples, steps, nodes, width = x.shape
        h, out = x.new_zeros(samples * nodes, 4), []
        for step in range(steps):
            h = self.cell(x[:, step].reshape(samples * nodes, width), h)
            out.append(h.view(samples, nodes, 4))
        return torch.stack(out, 1)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("rows", [[0], 0, slice(0, 1), torch.tensor([0])])
def test_rows_that_are_not_the_calls_cannot_be_named_by_number(rows, samples):
    model, x = Nodes(), torch.randn(samples, 8, 3, 2)
    with Carry(model, override=True) as carry:
        model(x[:, :4])
        with pytest.raises(
            CarryError, match=rf"has {3 * samples} rows, and the call's input has {samples}.* bool mask"
        ):
            carry.reset(rows)
        carry.reset(torch.arange(3 * samples) < 3)  # all nodes of the first sample
        out = model(x[:, 4:])
    torch.testing.assert_close(out[0], model(x[:1, 4:])[0])
    torch.testing.assert_close(out[1:], model(x)[1:, 4:])


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_a_model_of_one_layer_is_given_a_state_as_that_layer_takes_it(kind):
    model, x = nn.Sequential(kind(3, 4, 2, batch_first=True)), torch.randn(5, 6, 3)
    h, c = torch.randn(2, 5, 4, requires_grad=True), torch.randn(2, 5, 4)
    own = h if kind is nn.GRU else (h, c)
    with Carry(model) as carry:
        carry.state = own
        output, _ = model(x)
    assert torch.equal(output, model[0](x, own)[0])
    output.sum().backward()
    assert h.grad is not None  # an encoder's state is trained through the first call


def test_a_state_that_cannot_be_named_is_refused_with_the_way_out():
    h = torch.zeros(1, 2, 4)
    with (
        Carry(nn.ModuleDict({"a": nn.GRU(3, 4), "b": nn.LSTM(3, 4)})) as carry,
        pytest.raises(StateMismatch, match=r"Tensor, and there are 2 layers: hs\.State\(\{'a\.h': \.\.\., 'b\.h': "),
    ):
        carry.state = h
    with Carry(nn.LSTM(3, 4)) as carry, pytest.raises(StateMismatch, match=r"\(h, c\)"):
        carry.state = h
    with pytest.raises(BadInput, match=r"init is 'Tensor'.*carry\.state = \(h, c\)"):
        Carry(nn.GRU(3, 4), init=h)


def test_a_second_carry_of_a_bare_layer_is_refused_by_its_name_in_words():
    gru = nn.GRU(3, 4)
    with Carry(gru), pytest.raises(CarryError, match="the model itself is carried by another Carry already"):
        Carry(gru)
