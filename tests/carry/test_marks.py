"""Rows that start anew or end within one call of an unmodified model."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from hiddenstate.carry import Carry, Learned, Streams
from hiddenstate.errors import BadInput, CarryError, StateMismatch
from hiddenstate.unrolling import Recurrent
from tests.support.calling import masked, subclassed
from tests.support.cells import TanhCell
from tests.support.models import Chunked, Deep, Packed, Stepping, TimeFirst


class OverRecurrent(nn.Module):
    """Cells of the user's own, run by Recurrent."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Recurrent(TanhCell, 3, 4, num_layers=2)

    def forward(self, x):
        return self.stack(x)[0]


MODELS = {
    "deep": Deep,
    "chunked": Chunked,
    "lstm cell": lambda: Stepping(nn.LSTMCell(3, 4)),
    "recurrent": OverRecurrent,
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@given(sizes=st.lists(st.integers(1, 9), min_size=3, max_size=7), steps=st.integers(1, 6))
def test_streamed_sequences_equal_each_sequence_by_itself(make, sizes, steps):
    model = make()
    sequences = [torch.randn(size, 3) for size in sizes]
    rows: list[list[torch.Tensor]] = [[], [], []]
    with Carry(model) as carry, torch.no_grad():
        for chunk in Streams(sequences, batch=3, steps=steps):
            carry.mark(starts=chunk.starts, lengths=chunk.lengths)
            out = model(chunk.x)
            for row in range(3):
                length = int(chunk.lengths[row])
                for t in range(length):
                    if chunk.starts[row, t]:
                        rows[row].append(torch.zeros(0, out.shape[-1]))
                    rows[row][-1] = torch.cat([rows[row][-1], out[row, t : t + 1]])
        found = [sequence for row in rows for sequence in row]
    with torch.no_grad():
        expected = [model(sequence[None])[0] for sequence in sequences]
    assert len(found) == len(expected)
    for out in expected:
        assert any(out.shape == other.shape and torch.allclose(out, other, atol=1e-5) for other in found)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@given(lengths=st.lists(st.integers(0, 6), min_size=3, max_size=3))
def test_a_row_is_kept_at_its_own_length_and_waits_with_none(make, lengths):
    model, x, more = make(), torch.randn(3, 6, 3), torch.randn(3, 6, 3)
    with Carry(model) as carry, torch.no_grad():
        model(x)
        carry.mark(lengths=torch.tensor(lengths))
        model(more)
        out = model(x)
    for row, length in enumerate(lengths):
        alone = torch.cat([x[row : row + 1], more[row : row + 1, :length], x[row : row + 1]], dim=1)
        torch.testing.assert_close(out[row : row + 1], model(alone)[:, -6:], atol=1e-5, rtol=1e-4)


def test_a_row_goes_back_to_the_learned_state_in_mid_sequence_with_gradient():
    layer, x = nn.GRU(3, 4, batch_first=True), torch.randn(2, 5, 3)
    learned = Learned(layer, std=0.5)
    starts = torch.zeros(2, 5, dtype=torch.bool)
    starts[1, 3] = True
    with Carry(layer, init=learned) as carry:
        layer(x)
        carry.mark(starts=starts)
        out, _ = layer(x)
        expected, _ = copy.deepcopy(layer)(x[1:, 3:], learned(1)["h"].detach())
        torch.testing.assert_close(out[1:, 3:], expected)
        learned.zero_grad()
        out[0].sum().backward(retain_graph=True)
        assert learned.rows["h"].grad is None or not learned.rows["h"].grad.any()
        out[1].sum().backward()
        assert learned.rows["h"].grad.any()


def test_marks_hold_for_one_call_and_survive_one_that_fails():
    class Failing(Deep):
        fail = True

        def forward(self, x):
            if self.fail:
                raise ArithmeticError
            return super().forward(x)

    model, x = Failing(), torch.randn(2, 4, 3)
    with Carry(model) as carry:
        carry.mark(lengths=torch.tensor([4, 0]))
        with pytest.raises(ArithmeticError):
            model(x)
        model.fail = False
        model(x)
        assert not carry.state["gru.h"][:, 1].any()
        model(x)
        assert carry.state["gru.h"][:, 1].any()
    assert not any("forward" in vars(module) for module in model.modules())


def test_time_first_models_are_marked_by_rows_too():
    model, x = TimeFirst(), torch.randn(5, 2, 3)
    with Carry(model) as carry:
        carry.mark(lengths=torch.tensor([5, 2]))
        out, _ = model(x)
    torch.testing.assert_close(carry.state["rnn.h"][:, 1], model.rnn(x[:2, 1])[1])
    assert out.shape == (5, 2, 2)


def test_marks_that_do_not_fit_are_refused_and_nothing_is_lost():
    model, x = Deep(), torch.randn(3, 4, 3)
    with Carry(model) as carry:
        model(x)
        before = carry.state["gru.h"]
        for marks, error, message in [
            (
                {"lengths": torch.tensor([4, 4])},
                StateMismatch,
                r"told of 2 rows, but the layer 'encoder.lstm'.* 3 rows",
            ),
            (
                {"starts": torch.zeros(3, 2, dtype=torch.bool)},
                StateMismatch,
                r"told of 2 steps.*'encoder.lstm' is at step 4",
            ),
            ({"starts": torch.zeros(3, 9, dtype=torch.bool)}, CarryError, r"told of 9 steps.*'encoder.lstm' took 4"),
            ({"lengths": torch.tensor([9, 4, 4])}, CarryError, r"told of 9 steps.*took 4"),
        ]:
            carry.mark(**marks)
            with pytest.raises(error, match=message):
                model(x)
            assert torch.equal(carry.state["gru.h"], before)
        for marks, message in [
            ({"starts": torch.zeros(3, 4)}, r"starts are torch.float32 of shape \(3, 4\), but a bool tensor"),
            ({"starts": torch.zeros(3, dtype=torch.bool)}, r"starts are torch.bool of shape \(3,\)"),
            ({"lengths": torch.zeros(3)}, r"lengths are torch.float32 of shape \(3,\)"),
            ({"lengths": torch.tensor([1, -1])}, r"a row has -1 steps"),
            (
                {"lengths": [1], "starts": torch.zeros(2, 3, dtype=torch.bool)},
                r"starts speak of 2 rows, but lengths of 1",
            ),
        ]:
            with pytest.raises(BadInput, match=message):
                carry.mark(**marks)
    packed, gru = pack_padded_sequence(torch.randn(4, 2, 3), [4, 2]), Packed()
    with Carry(gru) as carry:
        carry.mark(lengths=[4, 2])
        with pytest.raises(CarryError, match=r"'gru' is called with a packed sequence, which has its own lengths"):
            gru(packed)
    with Carry(nn.GRU(3, 4)) as carry:
        carry.mark(lengths=[4])
        with pytest.raises(CarryError, match=r"with a sequence without rows"):
            carry._layers[0].module(torch.randn(4, 3))


class FromAStart(nn.Module):
    """A layer or a cell that is handed a start of the model's own, made of `start`."""

    def __init__(self, start, *, fused: bool) -> None:
        super().__init__()
        self.h0, self.encode, self.start, self.fused = nn.Parameter(torch.randn(1, 4)), nn.Linear(3, 4), start, fused
        self.rnn = nn.GRU(3, 4, batch_first=True) if fused else nn.GRUCell(3, 4)

    def forward(self, x):
        h, out = self.start(self, x), []
        if self.fused:
            return self.rnn(x, h[None].contiguous())[0]
        for frame in x.unbind(1):
            h = self.rnn(frame, h)
            out.append(h)
        return torch.stack(out, 1)


def marked(model, x, *, override):
    """The second piece of x, in which row 1 starts anew at its third step, with the gradients of that row."""
    starts = torch.zeros(2, 6, dtype=torch.bool)
    starts[1, 2] = True
    with Carry(model, override=override) as carry:
        model(x[:, :6])
        carry.mark(starts=starts)
        return model(x[:, 6:])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("override", [True, False])
@pytest.mark.filterwarnings("ignore:the layer 'rnn' is handed a state")
def test_rows_start_anew_in_mid_sequence_as_the_model_starts_them(fused, override):
    model, x = FromAStart(lambda model, x: model.h0.expand(len(x), -1), fused=fused), torch.randn(2, 12, 3)
    out, alone = marked(model, x, override=override)[1, 2:], model(x[:, 8:])[1]
    torch.testing.assert_close(out, alone)
    ours, theirs = (torch.autograd.grad(each.sum(), model.h0)[0] for each in (out, alone))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.filterwarnings("ignore:the layer 'rnn' is handed a state")
def test_what_a_row_would_start_from_has_to_be_known(fused, rows):
    model = FromAStart(lambda model, x: torch.tanh(model.encode(x[:, 0])), fused=fused)
    with pytest.raises(CarryError, match=r"'rnn' start anew in mid-sequence, but the model makes.*Cut the input"):
        marked(model, torch.randn(2, 12, 3), override=rows == 1)


def test_cells_of_a_recurrent_start_by_themselves_or_not_at_all():
    model, x = OverRecurrent(), torch.randn(2, 12, 3)
    learned = Learned(model, std=1.0)
    with Carry(model, init=learned) as carry:
        model(x)
        carry.mark(starts=torch.ones(2, 12, dtype=torch.bool))
        with pytest.raises(
            CarryError, match=r"'stack' start anew in mid-sequence, where its cells start by themselves"
        ):
            model(x)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda gru, x: gru(x, x[..., :1])[0], "argument 1"),
        (lambda gru, x: gru(x, mask=x[..., :1])[0], "mask="),
        (lambda gru, x: gru(hx=None, mask=x[..., :1], x=x)[0], "mask="),
    ],
)
def test_a_marked_call_with_more_than_input_and_state_is_refused(call, name):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = subclassed(nn.GRU, masked)(3, 4, batch_first=True)

        def forward(self, x):
            return call(self.gru, x)

    model, x = Model(), torch.randn(3, 6, 3)
    with Carry(model) as carry:
        model(x)
        before = carry.state
        carry.mark(lengths=torch.tensor([6, 2, 4]))
        with pytest.raises(CarryError, match=rf"'gru' is run piece by piece, but it is also called with {name}, and"):
            model(x)
        torch.testing.assert_close(dict(carry.state), dict(before))


def test_a_model_that_takes_time_first_is_told_how_a_chunk_is_turned():
    model = nn.Sequential(nn.GRU(3, 4))
    chunk = next(iter(Streams([torch.randn(9, 3), torch.randn(7, 3)], batch=2, steps=5)))
    with Carry(model) as carry:
        carry.mark(starts=chunk.starts, lengths=chunk.lengths)
        with pytest.raises(StateMismatch, match=r"2 rows, .*'0' is called with 5 rows\. .*chunk\.x\.transpose\(0, 1\)"):
            model(chunk.x)
        carry.mark(starts=chunk.starts, lengths=chunk.lengths)
        assert model(chunk.x.transpose(0, 1))[0].shape == (5, 2, 4)
