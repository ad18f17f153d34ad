"""What trial calls tell of a model: one that needs its whole sequence, or keeps its own state, is not served."""

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.cells import layers, listeners
from hiddenstate.errors import NotServable
from hiddenstate.serve.trial import prepare
from hiddenstate.serve.trial_calls import sequence_in_a_call, tried


class Headed(nn.Module):
    """A fused layer with a head."""

    def __init__(self, head, *, batch_first=True):
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 6, batch_first=batch_first), head

    def forward(self, x):
        return self.head(self.rnn(x)[0])


class Looping(nn.Module):
    """A cell in a loop with a head."""

    def __init__(self, head):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(3, 6), head

    def forward(self, x):
        state, seen = None, []
        for t in range(x.size(1)):
            state = self.cell(x[:, t], state)
            seen.append(state[0])
        return self.head(torch.stack(seen, 1))


HEADS = {
    "steps 0 and 10": lambda out: torch.cat([out[:, 0], out[:, 10]], 1),
    "steps 0 and 3": lambda out: torch.cat([out[:, 0], out[:, 3]], 1),
    "the first ten": lambda out: out[:, :10],
    "the tenth or the last": lambda out: out[:, min(10, out.size(1) - 1)],
    "all but the first": lambda out: out[:, 1:],
    "the mean of ten": lambda out: out[:, :10].mean(1),
    "twelve, flattened": nn.Sequential(nn.Flatten(), nn.Linear(12 * 6, 2)),
}


@pytest.mark.parametrize("steps", [12, 20, 30])
@pytest.mark.parametrize("kind", [Headed, Looping])
@pytest.mark.parametrize("head", HEADS, ids=str)
def test_a_head_that_reads_steps_by_their_number_is_never_served(head, kind, steps):
    with pytest.raises(NotServable, match=r"cannot be served|does not take inputs like the example"):
        prepare(kind(HEADS[head]), example=torch.randn(1, steps, 3))


@pytest.mark.parametrize("head", [name for name in HEADS if name != "all but the first"])
def test_nor_is_it_without_an_example(head):
    with pytest.raises(NotServable):
        prepare(Headed(HEADS[head]))


def test_time_first_it_is_refused_too():
    with pytest.raises(
        NotServable,
        match=r"(?s)fed in pieces would not equal one call.*a piece raises IndexError \(index 3 is out of bounds",
    ):
        prepare(Headed(lambda out: torch.cat([out[0], out[3]], 1), batch_first=False), example=torch.randn(20, 1, 3))


def test_a_piece_that_raises_where_the_whole_runs_is_a_refusal_that_says_so():
    reason = r"(?s)fed in pieces would not equal one call.*a piece raises IndexError .*or reads them by their number"
    with pytest.raises(NotServable, match=reason):
        prepare(Headed(HEADS["steps 0 and 3"]), example=torch.randn(1, 20, 3))


def test_a_model_of_one_number_of_steps_needs_its_whole_sequence():
    reason = r"needs its whole sequence. It runs along axis 1 of its input, 12 steps in a call, and does not take 24"
    with pytest.raises(NotServable, match=reason):
        prepare(Headed(HEADS["twelve, flattened"]), example=torch.randn(1, 12, 3))


def test_an_output_of_another_length_than_the_input_is_refused():
    with pytest.raises(NotServable, match="gives for twice as many is neither as long nor twice as long"):
        prepare(Headed(HEADS["all but the first"]), example=torch.randn(1, 20, 3))


class Frames(nn.Module):
    """Takes samples, and runs along the frames that they are parted into."""

    def __init__(self, size=16, padding=0):
        super().__init__()
        self.cut, self.rnn = nn.Conv1d(1, 3, size, 16, padding=padding), nn.GRU(3, 6, batch_first=True)

    def forward(self, x):
        return self.rnn(self.cut(x[:, None]).transpose(1, 2))[0][:, -1]


class Stacked(nn.Module):
    """Joins four steps into one."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(12, 6, batch_first=True)

    def forward(self, x):
        return self.rnn(x.reshape(len(x), x.size(1) // 4, 12))[0]


@pytest.mark.parametrize(
    ("model", "chunks"),
    [(Frames(), torch.randn(3, 160)), (Stacked(), torch.randn(3, 20, 3))],
    ids=["frames", "stacked"],
)
def test_a_chunk_of_several_steps_is_one_input_where_chunks_equal_the_whole(model, chunks):
    whole = model(torch.cat(list(chunks))[None])[0]
    with hs.serve.Engine(model, "memory:", example=chunks[:1]) as engine:
        name = engine.open()
        answers = [engine.push(name, chunk) for chunk in chunks]
    torch.testing.assert_close(answers[-1], whole if whole.dim() == 1 else whole[-5:])


def test_chunks_that_overlap_do_not():
    with pytest.raises(NotServable, match=r"Two pieces cut at step 160 differ.*something before it mixes steps"):
        prepare(Frames(32, padding=8), example=torch.randn(1, 160))


def test_one_step_in_a_call_is_no_sequence():
    cell, gru = nn.GRUCell(3, 6), nn.GRU(3, 6, batch_first=True)
    assert sequence_in_a_call(cell, layers(cell), torch.randn(1, 3)) is None
    assert sequence_in_a_call(gru, layers(gru), torch.randn(2, 1, 3)) is None
    longer, axis = sequence_in_a_call(gru, layers(gru), torch.randn(2, 4, 3))
    assert (longer.shape, axis) == ((2, 8, 3), 1)


class Keeps(nn.Module):
    """Keeps the state in an attribute, detached."""

    def __init__(self):
        super().__init__()
        self.lstm, self.hidden = nn.LSTM(3, 6, batch_first=True), None

    def forward(self, x):
        out, state = self.lstm(x, self.hidden)
        self.hidden = tuple(part.detach() for part in state)
        return out


class MakesAnew(nn.Module):
    """Makes its state anew for other batches, and hands in a copy."""

    def __init__(self):
        super().__init__()
        self.gru, self.h = nn.GRU(3, 6, batch_first=True), None

    def forward(self, x):
        if self.h is None or self.h.size(1) != len(x):
            self.h = x.new_zeros(1, len(x), 6)
        out, self.h = self.gru(x, self.h.clone())
        return out


class InBuffer(nn.Module):
    """Keeps it in a buffer, and hands in a copy."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 6)
        self.register_buffer("memory", torch.zeros(1, 6))

    def forward(self, x):
        self.memory = self.cell(x, self.memory.expand(len(x), 6).clone())
        return self.memory


class FixedRows(nn.Module):
    """The tutorials' init_hidden, for one batch size."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(3, 6, batch_first=True)
        self.hidden = torch.zeros(1, 4, 6)

    def forward(self, x):
        out, self.hidden = self.rnn(x, self.hidden.detach())
        return out


@pytest.mark.parametrize("example", [None, torch.randn(4, 7, 3)], ids=["invented", "given"])
@pytest.mark.parametrize(
    ("model", "attribute"),
    [
        (Keeps(), "'lstm' itself, in self.hidden,"),
        (MakesAnew(), "'gru' itself, in self.h,"),
        (InBuffer(), "'cell' itself, in self.memory,"),
        (FixedRows(), "'rnn' itself, in self.hidden,"),
        (nn.Sequential(Keeps()), "'0.lstm' itself, in self.0.hidden,"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_model_that_keeps_its_own_state_is_refused_by_the_attributes_name(model, attribute, example):
    before = {name: value for name, value in vars(model).items() if name in ("hidden", "h")}
    if isinstance(model, InBuffer) and example is not None:
        example = example[:, 0]
    with pytest.raises(NotServable, match=f"it keeps the state of {attribute} where all callers would share one"):
        prepare(model, example=example)
    assert all(getattr(model, name) is value for name, value in before.items())
    assert not any(listeners(module) for module in model.modules())


def test_a_constant_that_is_handed_in_is_not_called_kept():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(3, 6, batch_first=True)
            self.register_buffer("start", torch.zeros(1, 1, 6))

        def forward(self, x):
            return self.gru(x, self.start.expand(1, len(x), 6).contiguous())[0]

    model = Constant()
    assert tried(model, layers(model), torch.randn(2, 5, 3)).kept == ""
    with pytest.raises(NotServable, match=r"would not equal one call.*zeros made in forward"):
        prepare(model)
