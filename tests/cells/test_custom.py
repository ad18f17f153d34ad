"""Users' own cells: the form of their state is found out, and kept."""

import copy
import pickle

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.cells import as_layer
from hiddenstate.errors import HiddenStateWarning, NotRecurrent, StateMismatch
from tests.support.cells import CELLS, HIDDEN, INPUT, LearnedCell, PairCell, TanhCell
from tests.support.models import OwnLayer, OwnTimeFirstLayer

every_cell = pytest.mark.parametrize("sample", CELLS.values(), ids=CELLS)


@every_cell
def test_a_state_goes_to_names_and_back(sample):
    cell, x = sample.cell(), sample.x()[:, 0]
    layer = as_layer(cell, x)
    native = layer.to_native(layer.initial(3))
    _, after = layer.split(cell(x, native))
    state = layer.to_state(after, batch=3)
    assert tuple(state) == sample.parts
    assert state.batch == 3
    again = layer.to_native(state)
    torch.testing.assert_close(again, after)
    assert type(again) is type(after)


@every_cell
def test_finding_out_leaves_no_trace(sample):
    cell, x = sample.cell().train(), sample.x()[:, 0]
    before = {name: value.clone() for name, value in cell.state_dict().items()}
    random = torch.get_rng_state()
    calls = []
    cell.register_forward_hook(lambda *_: calls.append(1))
    layer = as_layer(cell, x)
    layer.spec, layer.initial(2)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in cell.state_dict().items())
    assert not calls
    assert all(parameter.grad is None for parameter in cell.parameters())


def test_a_cell_that_counts_its_calls_is_not_counted_up():
    class Counter(TanhCell):
        def __init__(self):
            super().__init__()
            self.calls = 0
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x, h):
            self.calls += 1
            self.seen += 1
            self.last = x
            return super().forward(x, h)

    cell = Counter()
    as_layer(cell).initial(3)
    assert cell.calls == 0
    assert cell.seen == 0
    assert not hasattr(cell, "last")


def test_initial_state_wins_over_hidden_size():
    cell = LearnedCell()
    assert torch.equal(as_layer(cell).initial(2)["h"], cell.start.expand(2, -1))
    assert as_layer(cell).initial(2)["h"].requires_grad


def test_initial_state_may_ask_for_device_and_dtype():
    class Asking(TanhCell):
        def initial_state(self, batch, device, dtype):
            return torch.zeros(batch, self.hidden_size, device=device, dtype=dtype)

    assert as_layer(Asking().double()).initial(2)["h"].dtype == torch.float64


def test_zeros_have_the_weights_dtype():
    assert as_layer(PairCell().to(torch.float16)).initial(2)["c"].dtype == torch.float16


def test_an_initial_state_without_rows_is_refused():
    class Flat(TanhCell):
        def initial_state(self, batch):
            return torch.zeros(1, self.hidden_size)

    with pytest.raises(StateMismatch, match=r"no axis has one entry for each row.*h0\.expand\(batch, -1\)"):
        as_layer(Flat()).initial(2)


def test_a_cell_that_returns_something_else_is_refused():
    class Odd(TanhCell):
        def initial_state(self, batch):
            return torch.zeros(batch, self.hidden_size)

        def forward(self, x, h):
            return h, h, h

    with pytest.raises(NotRecurrent, match=r"Odd returned \(a tensor, a tensor, a tensor\), but its state is a tensor"):
        hs.unroll(Odd(), torch.randn(2, 3, INPUT))


def test_a_cell_that_changes_the_form_of_its_first_state_is_refused():
    class Fickle(TanhCell):
        def initial_state(self, batch):
            zeros = torch.zeros(batch, self.hidden_size)
            return zeros if batch < 5 else (zeros, zeros, zeros)

    with pytest.raises(StateMismatch, match=r"returned the parts 0, 1, 2, but its state had h before"):
        as_layer(Fickle()).initial(5)


def test_a_state_of_other_parts_is_refused():
    with pytest.raises(StateMismatch, match=r"the state has the parts x, but TanhCell needs h"):
        as_layer(TanhCell()).to_native(hs.State({"x": torch.zeros(2, HIDDEN)}))


def test_copies_and_pickles_are_cells_of_their_own():
    cell, x = PairCell(), torch.randn(2, 3, INPUT)
    out = hs.unroll(cell, x)[0]
    assert torch.equal(hs.unroll(copy.deepcopy(cell), x)[0], out)
    assert torch.equal(hs.unroll(pickle.loads(pickle.dumps(cell)), x)[0], out)


def test_a_module_without_any_size_says_what_is_missing():
    class Bare(nn.Module):
        def forward(self, x, z):
            return z

    with pytest.raises(NotRecurrent, match=r"Bare has neither initial_state\(batch\) nor hidden_size"):
        as_layer(Bare()).initial(2)


def test_a_given_state_without_a_matching_axis_is_refused():
    class Bare(nn.Module):
        def forward(self, x, z):
            return z

    with pytest.raises(
        StateMismatch, match=r"called with 3 rows and a state of shape \(2, 4\).*initial_state\(batch\)"
    ):
        hs.unroll(Bare(), torch.randn(3, 5, INPUT), torch.zeros(2, 4))


@pytest.mark.parametrize(("make", "batch_first", "layers_of"), [(OwnLayer, True, 1), (OwnTimeFirstLayer, False, 2)])
def test_a_layer_from_scratch_that_takes_whole_sequences_is_told_from_a_cell(make, batch_first, layers_of):
    module = make().double()
    (layer,) = hs.layers(nn.Sequential(module))
    assert (layer.kind, layer.fused) == ("layer", True)
    assert (layer.spec.batch_first, layer.spec.layers, layer.spec.sizes["h"]) == (batch_first, layers_of, 4)
    x = torch.randn(3, 6, 3, dtype=torch.float64)
    whole = module(x if batch_first else x.transpose(0, 1))[0]
    whole = whole if batch_first else whole.transpose(0, 1)
    torch.testing.assert_close(hs.unroll(module, x, time_axis=1)[0], whole)
    out, last = hs.unroll(module, x, lengths=[6, 2, 4], time_axis=1)
    torch.testing.assert_close(out[1, :2], whole[1, :2])
    assert not out[1, 2:].any()
    torch.testing.assert_close(last.select([1])["h"], hs.unroll(module, x[1:2, :2], time_axis=1)[1]["h"])
    with hs.Carry(module) as carry:
        pieces = [module(piece if batch_first else piece.transpose(0, 1))[0] for piece in x.split(2, dim=1)]
        assert carry.state.batch == 3
    torch.testing.assert_close(torch.cat([p if batch_first else p.transpose(0, 1) for p in pieces], dim=1), whole)
    assert hs.check_split(module, x if batch_first else x.transpose(0, 1))


def test_a_tutorial_decoder_with_a_stacked_state_is_stepped():
    class DecoderRNN(nn.Module):
        def __init__(self, hidden_size, symbols):
            super().__init__()
            self.hidden_size = hidden_size
            self.embedding = nn.Embedding(symbols, hidden_size)
            self.gru = nn.GRU(hidden_size, hidden_size)
            self.out = nn.Linear(hidden_size, symbols)

        def forward(self, input, hidden):
            embedded = torch.relu(self.embedding(input)).view(1, -1, self.hidden_size)
            output, hidden = self.gru(embedded, hidden)
            return self.out(output[0]), hidden

    decoder, tokens = DecoderRNN(4, 9), torch.randint(9, (2, 5))
    out, state = hs.unroll(decoder, tokens)
    assert out.shape == (2, 5, 9)
    assert dict(state.batch_axis) == {"h": 1}
    hidden = torch.zeros(1, 2, 4)
    for t in range(5):
        expected, hidden = decoder(tokens[:, t], hidden)
    torch.testing.assert_close(out[:, -1], expected)


def one_step(cell):
    return cell(torch.randn(2, 3), (torch.zeros(2, 4), torch.zeros(2, 4)))


def recorded_step(cell):
    with hs.record(cell):
        one_step(cell)


def penalized_step(cell):
    with hs.regularize.Penalty(cell, activity=1.0) as penalty:
        one_step(cell)
        penalty()


@pytest.mark.parametrize("use", [lambda cell: hs.unroll(cell, torch.randn(2, 5, 3)), recorded_step, penalized_step])
def test_a_cell_that_keeps_its_cell_before_its_hidden_state_is_told_how_the_parts_are_named(use):
    class CellFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden_size, self.gates = 4, nn.Linear(3 + 4, 16)

        def forward(self, x, state):
            c, h = state
            i, f, g, o = self.gates(torch.cat([x, h], dim=1)).chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            return h, (c, h)

    with pytest.warns(HiddenStateWarning, match=r"CellFirst keeps its state as \(c, h\), .* 'h' here is its c"):
        use(CellFirst())
