"""The laws of unrolling, for every kind of cell."""

import itertools
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DataParallel

import hiddenstate as hs
from hiddenstate.cells import as_layer
from hiddenstate.errors import BadInput, NotRecurrent, StateMismatch
from tests.support.cells import CELLS, HIDDEN, INPUT, TanhCell
from tests.support.equal import assert_same, inputs_of

unroll = partial(hs.unroll, time_axis=1)  # rows first, also for layers whose own layout is another

every_cell = pytest.mark.parametrize("sample", CELLS.values(), ids=CELLS)

FUSED = {
    "rnn": lambda: nn.RNN(INPUT, HIDDEN, batch_first=True),
    "relu": lambda: nn.RNN(INPUT, HIDDEN, nonlinearity="relu"),
    "gru": lambda: nn.GRU(INPUT, HIDDEN, num_layers=2),
    "lstm": lambda: nn.LSTM(INPUT, HIDDEN, num_layers=2, proj_size=2, batch_first=True),
    "recurrent": lambda: hs.Recurrent(nn.LSTMCell, INPUT, HIDDEN, num_layers=2),
}
every_layer = pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)


def flat(result):
    out, state = result
    return [out, *state.values()]


def start(layer, batch):
    return hs.State(
        {n: torch.randn_like(p, requires_grad=True) for n, p in layer.initial(batch).items()},
        layer.initial(batch).batch_axis,
    )


@every_cell
def test_a_cell_gives_outputs_for_every_step_and_one_final_state(sample):
    cell, x = sample.cell(), sample.x(batch=3, steps=5)
    out, state = unroll(cell, x)
    assert out.shape == (3, 5, sample.output)
    assert tuple(state) == sample.parts
    assert state.batch == 3


@every_cell
def test_unrolling_is_the_loop_one_would_write(sample):
    cell, x = sample.cell(), sample.x()
    layer = as_layer(cell, x[:, 0])

    def by_hand():
        native, outputs = layer.to_native(layer.initial(len(x))), []
        for t in range(x.shape[1]):
            out, native = layer.split(cell(x[:, t], native))
            outputs.append(out)
        return [torch.stack(outputs, 1), *layer.to_state(native).values()]

    assert_same(by_hand, lambda: flat(unroll(cell, x)), inputs_of(cell, x))


@pytest.mark.parametrize("sample", CELLS.values(), ids=CELLS)
@given(cut=st.integers(1, 5))
def test_cutting_a_sequence_anywhere_changes_nothing(sample, cut):
    cell, x = sample.cell(), sample.x(batch=2, steps=6)

    def in_two():
        head, middle = unroll(cell, x[:, :cut])
        tail, final = unroll(cell, x[:, cut:], middle)
        return [torch.cat([head, tail], 1), *final.values()]

    assert_same(lambda: flat(unroll(cell, x)), in_two, inputs_of(cell, x))


@every_layer
@given(cut=st.integers(1, 5))
def test_cutting_a_sequence_of_a_fused_layer_anywhere_changes_nothing(make, cut):
    layer, x = make().double(), torch.randn(2, 6, INPUT, dtype=torch.float64)

    def in_two():
        head, middle = unroll(layer, x[:, :cut])
        tail, final = unroll(layer, x[:, cut:], middle)
        return [torch.cat([head, tail], 1), *final.values()]

    assert_same(lambda: flat(unroll(layer, x)), in_two, inputs_of(layer, x))


def rows_one_by_one(module, x, state, lengths):
    """The oracle for lengths: every row alone, cut to its length, padded afterwards; one without steps waits."""
    outs, finals = [], []
    for row, length in enumerate(lengths):
        first = None if state is None else state.select([row])
        if length == 0:
            like, _ = unroll(module, torch.zeros_like(x[row : row + 1]), first)
            outs.append(torch.zeros_like(like))
            finals.append(as_layer(module).initial(1) if first is None else first)
            continue
        out, final = unroll(module, x[row : row + 1, :length], first)
        outs.append(torch.cat([out, out.new_zeros(1, x.shape[1] - length, *out.shape[2:])], 1))
        finals.append(final)
    return [torch.cat(outs), *hs.State.cat(finals).values()]


def segments_one_by_one(module, x, state, resets):
    """The oracle for resets: every row alone, every segment of it a sequence of its own."""
    outs, finals = [], []
    for row in range(len(x)):
        first = None if state is None else state.select([row])
        cuts = [t for t in range(x.shape[1]) if resets[row, t]]
        edges = sorted({0, *cuts, x.shape[1]})
        pieces = []
        for a, b in itertools.pairwise(edges):
            out, final = unroll(module, x[row : row + 1, a:b], None if a in cuts else first)
            pieces.append(out)
        outs.append(torch.cat(pieces, 1))
        finals.append(final)
    return [torch.cat(outs), *hs.State.cat(finals).values()]


LENGTHS = st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any)
RESETS = st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=3, max_size=3)


@every_cell
@given(lengths=LENGTHS, given_state=st.booleans())
def test_lengths_give_every_row_what_it_gets_alone(sample, lengths, given_state):
    check_lengths(sample.cell(), sample.x(), lengths, given_state)


@pytest.mark.parametrize(
    "make",
    [
        *FUSED.values(),
        lambda: nn.LSTM(INPUT, HIDDEN, num_layers=2, bidirectional=True),
        lambda: nn.GRU(INPUT, HIDDEN, bidirectional=True, batch_first=True),
        lambda: hs.Recurrent(nn.GRUCell, INPUT, HIDDEN, num_layers=2, bidirectional=True),
    ],
)
@given(lengths=LENGTHS, given_state=st.booleans())
def test_lengths_of_layers_hold_in_both_directions(make, lengths, given_state):
    check_lengths(make().double(), torch.randn(3, 5, INPUT, dtype=torch.float64), lengths, given_state)


def check_lengths(module, x, lengths, given_state):
    layer = as_layer(module, x[:, 0])
    state = start(layer, 3) if given_state else None
    wanted = inputs_of(module, x, *(state or {}).values())
    assert_same(
        lambda: rows_one_by_one(module, x, state, lengths),
        lambda: flat(unroll(module, x, state, lengths=torch.tensor(lengths))),
        wanted,
    )


@every_cell
@given(resets=RESETS, given_state=st.booleans())
def test_resets_make_separate_sequences_of_a_cells_row(sample, resets, given_state):
    check_resets(sample.cell(), sample.x(), resets, given_state)


@every_layer
@given(resets=RESETS, given_state=st.booleans())
def test_resets_make_separate_sequences_of_a_layers_row(make, resets, given_state):
    check_resets(make().double(), torch.randn(3, 5, INPUT, dtype=torch.float64), resets, given_state)


def check_resets(module, x, resets, given_state):
    layer, resets = as_layer(module, x[:, 0]), torch.tensor(resets)
    state = start(layer, 3) if given_state else None
    assert_same(
        lambda: segments_one_by_one(module, x, state, resets),
        lambda: flat(unroll(module, x, state, resets=resets)),
        inputs_of(module, x, *(state or {}).values()),
    )


@pytest.mark.parametrize("kind", ["rnn", "gru", "lstm"])
@given(resets=RESETS, lengths=LENGTHS)
def test_a_fused_layer_with_resets_and_lengths_is_its_cell_in_a_loop(kind, resets, lengths):
    layer = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}[kind](INPUT, HIDDEN).double()
    cell = {"rnn": nn.RNNCell, "gru": nn.GRUCell, "lstm": nn.LSTMCell}[kind](INPUT, HIDDEN).double()
    for own, theirs in zip(layer.parameters(), cell.parameters(), strict=True):
        theirs.data = own.data
    x, resets = torch.randn(3, 5, INPUT, dtype=torch.float64), torch.tensor(resets)
    fused, state = unroll(layer, x, lengths=lengths, resets=resets)
    looped, final = unroll(cell, x, lengths=lengths, resets=resets, engine="loop")
    torch.testing.assert_close(fused, looped)
    torch.testing.assert_close(state["h"][0], final["h"])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("make", [*FUSED.values(), lambda: CELLS["layer norm lstm"].cell(), TanhCell])
def test_what_lies_in_the_padding_reaches_neither_outputs_nor_gradients(make, value):
    module, x = make().double(), torch.randn(3, 5, INPUT, dtype=torch.float64)
    lengths = [2, 5, 1]
    for row, length in enumerate(lengths):
        x[row, length:] = value
    x.requires_grad_()
    out, state = unroll(module, x, lengths=lengths)
    (out.sum() + sum(part.sum() for part in state.values())).backward()
    assert all(torch.isfinite(t).all() for t in [out, *state.values(), x.grad, *(p.grad for p in module.parameters())])
    assert all(
        (x.grad[row, length:] == 0).all() and (out[row, length:] == 0).all() for row, length in enumerate(lengths)
    )


def test_a_reset_cuts_the_gradient():
    cell, x = CELLS["tensor"].cell(), CELLS["tensor"].x().requires_grad_()
    resets = torch.zeros(3, 5, dtype=torch.bool)
    resets[1, 3] = True
    out, _ = unroll(cell, x, resets=resets)
    out[:, -1].sum().backward()
    assert (x.grad[1, :3] == 0).all()
    assert (x.grad[1, 3:] != 0).any()
    assert (x.grad[0, :3] != 0).any()


def test_a_reset_leads_back_to_the_learned_state_with_gradient():
    cell, x = CELLS["learned"].cell(), CELLS["learned"].x()
    resets = torch.zeros(3, 5, dtype=torch.bool)
    resets[:, 4] = True
    given_state = torch.zeros(3, HIDDEN, dtype=torch.float64)
    out, _ = unroll(cell, x, given_state, resets=resets)
    torch.testing.assert_close(out[:, 4], cell(x[:, 4], cell.initial_state(3)))
    out[:, 4].sum().backward()
    assert (cell.start.grad != 0).all()


def test_a_reset_at_the_first_step_wins_over_a_given_state():
    for module in (nn.GRUCell(INPUT, HIDDEN), nn.GRU(INPUT, HIDDEN)):
        layer, x = as_layer(module), torch.randn(2, 3, INPUT)
        resets = torch.tensor([[True, False, False], [False, False, False]])
        state = start(layer, 2)
        out, _ = unroll(module, x, state, resets=resets)
        torch.testing.assert_close(out[:1], unroll(module, x[:1])[0])
        torch.testing.assert_close(out[1:], unroll(module, x[1:], state.select([1]))[0])


def test_lengths_and_resets_that_say_nothing_change_nothing():
    cell, x = TanhCell(), torch.randn(2, 3, INPUT)
    plain = unroll(cell, x)[0]
    assert torch.equal(unroll(cell, x, lengths=[3, 3], resets=torch.zeros(2, 3, dtype=torch.bool))[0], plain)


@every_cell
def test_a_state_is_taken_in_the_cells_own_form_too(sample):
    cell, x = sample.cell(), sample.x()
    layer = as_layer(cell, x[:, 0])
    state = start(layer, 3)
    native = unroll(cell, x, layer.to_native(state))
    torch.testing.assert_close(flat(native), flat(unroll(cell, x, state)))


@every_cell
def test_hooks_of_a_cell_fire_at_every_step(sample):
    cell, x, seen = sample.cell(), sample.x(steps=4), []
    handle = cell.register_forward_hook(lambda *_: seen.append(1))
    unroll(cell, x)
    assert len(seen) == 4
    handle.remove()
    unroll(cell, x)
    assert len(seen) == 4


def test_a_cell_that_is_wrapped_is_unwrapped():
    cell, x = TanhCell(), torch.randn(2, 3, INPUT)
    assert torch.equal(unroll(DataParallel(cell), x)[0], unroll(cell, x)[0])


def test_a_cell_of_which_nothing_is_known_runs_from_a_given_state():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(5, 2)

        def forward(self, x, z):
            return self.mix(torch.cat([x, z], -1))

    cell, x, zeros = Bare(), torch.randn(2, 3, 3), torch.zeros(2, 2)
    out, state = unroll(cell, x, zeros)
    assert out.shape == (2, 3, 2)
    other = Bare()
    other.load_state_dict(cell.state_dict())
    assert torch.equal(unroll(other, x, hs.State({"h": zeros}))[1]["h"], state["h"])
    assert torch.equal(unroll(other, x)[0], out)  # by a trial, its state is known without one


def test_an_output_that_is_a_part_with_rows_elsewhere_gets_its_rows_first():
    class Deep(nn.Module):
        def initial_state(self, batch):
            return torch.zeros(2, batch, 3)

        def forward(self, x, state):
            return 0.5 * state + x

    out, state = unroll(Deep(), torch.ones(4, 5, 3))
    assert out.shape == (4, 5, 2, 3)
    assert torch.equal(out[:, -1].transpose(0, 1), state["h"])


def test_an_output_that_is_no_tensor_of_rows_is_refused():
    class Chatty(TanhCell):
        def forward(self, x, h):
            h = super().forward(x, h)
            return {"out": h}, h

    with pytest.raises(NotRecurrent, match=r"Chatty returned an output that is dict for 2 rows.*torch\.cat"):
        unroll(Chatty(), torch.randn(2, 3, INPUT))


@pytest.mark.parametrize("engine", ["loop", "auto"])
@pytest.mark.parametrize("cell", [TanhCell(), nn.LSTMCell(INPUT, 4)], ids=["own", "torch's"])
def test_an_input_of_another_width_is_explained_when_the_cell_fails(cell, engine):
    with pytest.raises(BadInput, match=rf"each step has {INPUT + 1} features, but \w+ takes {INPUT}, and failed"):
        unroll(cell, torch.randn(2, 5, INPUT + 1), engine=engine)
    with pytest.raises(BadInput, match=r"Axis 1 has that many: it may be time, x\.transpose\(1, 2\)"):
        unroll(cell, torch.randn(2, INPUT, INPUT + 4), engine=engine)


def test_an_input_of_another_width_is_explained_of_cells_that_name_no_width():
    class Unsaid(nn.Module):
        hidden_size = 4

        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(3 + 4, 4)

        def forward(self, x, h):
            return torch.tanh(self.mix(torch.cat([x, h], dim=1)))

    with pytest.raises(BadInput, match=r"each step has 5 features, but Unsaid takes 3, and failed with it: mat1"):
        unroll(Unsaid(), torch.randn(2, 6, 5))

    class Broken(Unsaid):
        def forward(self, x, h):
            raise ValueError("a mistake of the cell's own")

    with pytest.raises(ValueError, match="a mistake of the cell's own"):
        unroll(Broken(), torch.randn(2, 6, 5))


def test_a_state_of_another_size_is_explained_when_the_cell_fails():
    with pytest.raises(StateMismatch, match=r"part 'h' of the given state is \(2, 9\).*TanhCell starts from \(2, 4\)"):
        unroll(TanhCell(), torch.randn(2, 3, INPUT), torch.zeros(2, 9))
    with pytest.raises(StateMismatch, match=r"torch\.float64 on cpu.*starts from \(2, 4\) torch\.float32"):
        unroll(TanhCell(), torch.randn(2, 3, INPUT), torch.zeros(2, 4, dtype=torch.float64))


def test_a_state_of_another_nesting_is_refused_and_does_no_lasting_harm():
    cell, x = TanhCell(), torch.randn(2, 3, INPUT)
    unroll(cell, x)
    with pytest.raises(StateMismatch, match=r"the state is \(a tensor, a tensor\), but that of TanhCell is a tensor"):
        unroll(cell, x, (torch.zeros(2, 4), torch.zeros(2, 4)))
    unroll(cell, x)


def test_a_failing_cell_fails_with_its_own_error():
    class Broken(TanhCell):
        def initial_state(self, batch):
            return torch.zeros(batch, self.hidden_size)

        def forward(self, x, h):
            raise ValueError("my own mistake")

    with pytest.raises(ValueError, match="my own mistake"):
        unroll(Broken(), torch.randn(2, 3, INPUT))


def test_what_is_no_cell_is_refused():
    with pytest.raises(NotRecurrent, match="Linear is no recurrent layer or cell"):
        unroll(nn.Linear(3, 4), torch.randn(2, 3, INPUT))


def test_an_unknown_engine_is_refused():
    with pytest.raises(BadInput, match="engine is 'warp', but 'auto', 'fast' or 'loop' is needed"):
        unroll(TanhCell(), torch.randn(2, 3, INPUT), engine="warp")


@pytest.mark.parametrize("engine", ["loop", "auto"])
@pytest.mark.parametrize(
    "make", [lambda: nn.GRUCell(3, 4), lambda: nn.LSTM(3, 4), lambda: hs.Recurrent(nn.GRUCell, 3, 4)]
)
@pytest.mark.parametrize("with_state", [True, False])
def test_where_all_rows_wait_the_state_is_the_one_that_came_in(make, engine, with_state):
    module, x = make(), torch.full((2, 5, 3), torch.nan)
    state = as_layer(module).initial(2).map(lambda part: torch.randn_like(part)) if with_state else None
    out, final = unroll(module, x, state, lengths=[0, 0], engine=engine)
    assert out.shape == (2, 5, 4)
    assert not out.any()
    expected = as_layer(module).initial(2) if state is None else state
    assert all(torch.equal(final[name], part) for name, part in expected.items())


def test_chunks_of_streams_can_be_unrolled_as_they_come():
    cell, texts = nn.GRUCell(1, 4), [torch.randn(n, 1) for n in (9, 3, 1)]
    state, ends = None, []
    for chunk in hs.Streams(texts, batch=2, steps=4):
        out, state = unroll(cell, chunk.x, state, lengths=chunk.lengths, resets=chunk.starts)
        ends.append((out, chunk))
    assert any((chunk.lengths == 0).any() for _, chunk in ends)
    whole = {len(text): unroll(cell, text[None])[0][0] for text in texts}
    rows = [torch.cat([out[row, : chunk.lengths[row]] for out, chunk in ends]) for row in range(2)]
    joined = [torch.cat(parts) for parts in ([whole[9]], [whole[3], whole[1]])]
    for row, expected in zip(rows, joined, strict=True):
        torch.testing.assert_close(row, expected)
